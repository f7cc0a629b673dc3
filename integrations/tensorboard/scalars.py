"""The few aggregate curves for people without the plugin. What was not measured has no point; NaN and infinity are drawn as such."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.integrations.tensorboard.values import PREFIX, tag
from trainvet.recording import curve_points
from trainvet.report import Report
from trainvet.statistics import Facts, Snapshot, Vector

MOST_GROUPS, MOST_LOSSES, CURVE, WINDOW = 8, 4, 200, 200
_COUNTS = ("nan", "inf", "nonfinite")


class Aggregates:
    """Scalars by tag. Keeps the skipped steps of the last 200 attempts for the overflow rate."""

    def __init__(self) -> None:
        self._skipped: deque[float] = deque(maxlen=WINDOW)

    def add(self, snapshot: Snapshot) -> None:
        """Take note of every snapshot, also of those that are not drawn."""
        for track in snapshot.tracks("run.skipped").values():
            self._skipped.extend(track.values.tolist())

    def of(self, snapshot: Snapshot) -> dict[str, float]:
        """The aggregates of one snapshot that :meth:`add` has seen."""
        out: dict[str, float] = {}
        norms = _vector(snapshot, "gradient.norm")
        for track in snapshot.tracks("run.gradient_norm").values():
            out[tag("grad_norm", "total")] = float(track.values[-1])
        if norms is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                out.setdefault(tag("grad_norm", "total"), float(np.sqrt(np.sum(norms**2))))
            out[tag("grad_norm", "max_layer")] = float(np.max(norms))
        ratios = _vector(snapshot, "update.ratio")
        if ratios is not None and np.isfinite(ratios).any():  # 0/0 says nothing about the others
            ranked = np.sort(ratios[np.isfinite(ratios)])
            low, middle, high = np.interp(np.array((0.05, 0.5, 0.95)) * (len(ranked) - 1), np.arange(len(ranked)), ranked).tolist()
            out |= {tag("update_ratio", "p05"): low, tag("update_ratio", "median"): middle, tag("update_ratio", "p95"): high}
        for name, key in (("dead_fraction", "activation.dead_share"), ("saturated_fraction", "activation.saturated_share")):
            shares = _vector(snapshot, key)
            if shares is not None:
                out[tag(name, "max")] = float(np.max(shares))
        count = nonfinite(snapshot)
        if count is not None:
            out[tag("nonfinite", "count")] = count
        for track in snapshot.tracks("run.loss_scale").values():
            out[tag("loss_scale")] = float(track.values[-1])
        if self._skipped:
            out[tag("overflow", "rate")] = sum(self._skipped) / len(self._skipped)
        for name, track in list(snapshot.tracks("optimizer.learning_rate").items())[:MOST_GROUPS]:
            out[tag("lr", name)] = float(track.values[-1])
        losses = list(snapshot.tracks("loss.value").items())[:MOST_LOSSES]
        for name, track in losses:
            out[tag("loss") if len(losses) == 1 else tag("loss", name)] = float(track.values[-1])
        return out


def of_report(report: Report) -> dict[str, float]:
    """How many headlines there are, by severity, and our own share of the time."""
    out = {tag("findings", level.name.lower()): float(_count(report.findings, level)) for level in (Severity.WARNING, Severity.ERROR, Severity.FATAL)}
    share = report.cost.get("share", 0.0)
    if share > 0:
        out[tag("overhead", "percent")] = 100 * share
    return out


def nonfinite(snapshot: Snapshot) -> float | None:
    """Non-finite elements in the tables plus non-finite losses and gradient norms; None where nothing of that was measured."""
    seen, count = False, 0.0
    for table in snapshot.tables.values():
        for statistic in _COUNTS:
            vector = table.columns.get(statistic)
            if vector is not None and len(vector):
                seen = True
                total = float(vector.sum())
                count += total if total == total else float(np.nansum(vector))
    for key in ("loss.value", "run.gradient_norm"):
        for track in snapshot.tracks(key).values():
            seen = True
            count += float(np.count_nonzero(~np.isfinite(track.values)))
    return count if seen else None


def predicted(facts: Facts, start: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """The simulated learning rates from step ``start`` on, as (step, scalars by tag); at most 200 points per parameter group."""
    points: dict[int, dict[str, float]] = {}
    for schedule in facts.schedules[:MOST_GROUPS]:
        curve = np.asarray(schedule.curve, dtype=np.float64)[start:]
        if len(curve) == 0:
            continue
        places, values = curve_points(curve, CURVE)
        if len(places) < CURVE // 2 and len(curve) > len(places):  # a constant stretch shows as more than its two ends
            places = np.union1d(places, np.linspace(0, len(curve) - 1, CURVE - len(places)).astype(np.int64))
            values = curve[places]
        for place, value in zip(places.tolist(), values.tolist(), strict=True):
            points.setdefault(start + place, {})[tag("lr_schedule", schedule.group or "group")] = value
    return iter(sorted(points.items()))


@functools.cache
def dashboard() -> bytes:
    """A layout for the Custom Scalars dashboard, serialised: the update ratios as a band, and the curves that belong together."""
    from tensorboard.plugins.custom_scalar import layout_pb2 as protos

    def lines(title: str, *names: str) -> Any:
        return protos.Chart(title=title, multiline=protos.MultilineChartContent(tag=[f"^{PREFIX}{name}" for name in names]))

    ratios = protos.MarginChartContent.Series(value=tag("update_ratio", "median"), lower=tag("update_ratio", "p05"), upper=tag("update_ratio", "p95"))
    charts = [
        lines("findings", "findings/"),
        protos.Chart(title="update ratio over matrices: median, 5 % and 95 %", margin=protos.MarginChartContent(series=[ratios])),
        lines("gradient norm", "grad_norm/"),
        lines("learning rate, measured and predicted", "lr/", "lr_schedule/"),
        lines("dead and saturated, worst layer", "dead_fraction/", "saturated_fraction/"),
        lines("non-finite elements", "nonfinite/"),
        lines("loss scale and skipped steps", "loss_scale$", "overflow/"),
    ]
    return bytes(protos.Layout(category=[protos.Category(title="trainvet", chart=charts)]).SerializeToString())


def _count(findings: tuple[Finding, ...], level: Severity) -> int:
    return sum(finding.severity is level for finding in findings)


def _vector(snapshot: Snapshot, key: str) -> Vector | None:
    column: Any = snapshot.column(key)
    return column[1] if column is not None and len(column[1]) else None

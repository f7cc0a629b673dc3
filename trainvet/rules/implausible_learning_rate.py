"""LR101: a learning rate that cannot be meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Optimizer, Snapshot, Track, Vector


@dataclasses.dataclass
class ImplausibleLearningRate(Rule):
    """
    ## What it checks
    Error: a rate that is NaN, infinite or negative; a rate of exactly 0 for ``zeros`` applied steps that is not the end of a decay. Warning: a rate
    that grows more than ``jump`` times from one step to the next, to a height not seen before and not foreseen by the schedule. Information: a
    rate outside 1e-7 to 1e-2 with Adam and its kin, or an effective rate lr/(1-momentum) above 1 with SGD.
    ## Why it matters
    The rate is the number that ruins most runs, and a schedule or a callback can change it without a word.
    ## What to do
    Look at what sets the rate: schedule, callback, configuration.
    ## Known limits
    Downward steps are normal (the end of a one-cycle schedule falls elevenfold). A group at 0 from its first step beside groups that train is taken
    for a way to freeze it: information. Rates on a device are not read at every step.
    """

    code = "LR101"
    reads: ClassVar[frozenset[str]] = frozenset({"optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("a schedule or callback sets another rate than was meant", "a wrong number in the configuration")
    fixes = ("print what sets the rate at this step: schedule, callback or configuration",)

    zeros: int = 10
    jump: float = 10.0
    adam_low: float = 1e-7
    adam_high: float = 1e-2
    sgd_high: float = 1.0

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._optimizer: dict[str, Optimizer] = {}
        self._curve: dict[str, Vector] = {}
        self._groups: dict[str, dict[str, Any]] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Each group's optimizer and foreseen rates."""
        self._facts = facts
        self._optimizer = {group: optimizer for optimizer in facts.optimizers for group in optimizer.groups}
        self._curve = {schedule.group: schedule.curve for schedule in facts.schedules if len(schedule.curve)}
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every row; a block at the rate of the row before it is passed over."""
        tracks = snapshot.tracks("optimizer.learning_rate")
        for name, track in tracks.items():
            kept = self._groups.setdefault(name, {"last": np.nan, "peak": 0.0, "rows": 0, "zero": 0, "from": 0, "applied": 0, "told": []})
            if kept["rows"] and kept["last"] > 0 and bool((track.values == kept["last"]).all()):
                kept["rows"] += len(track.values)
                kept["applied"] = int(track.applied[-1])
            else:
                yield from self._rows(name, track, kept)

    def _rows(self, name: str, track: Track, kept: dict[str, Any]) -> Iterable[Finding]:
        for step, applied, rate in zip(track.steps.tolist(), track.applied.tolist(), track.values.tolist(), strict=True):
            moved = applied > kept["applied"]
            kept["applied"] = applied
            wrong = not (np.isfinite(rate) and rate >= 0)
            text = f"the learning rate is {rate:g}"
            yield from self._once(kept, "wrong", wrong, name, step, text, Severity.ERROR, rate, "a finite rate of at least 0")
            if wrong:
                continue
            if rate == 0 and moved:
                if not kept["zero"]:
                    kept.update({"from": step, "before zero": 0.0 if np.isnan(kept["last"]) else kept["last"]})
                kept["zero"] += 1
            elif rate > 0:
                kept["zero"] = 0
            idle = kept["zero"] >= self.zeros and not self._ended(name, step, kept)
            others = [other["peak"] for group, other in self._groups.items() if group != name]
            level = Severity.INFO if not kept["peak"] and max(others, default=0.0) > 0 else Severity.ERROR
            text = f"the learning rate has been 0 for {kept['zero']} applied steps"
            yield from self._once(kept, "zero", idle, name, step, text, level, rate, f"{self.zeros} applied steps", kept["from"])
            last, peak = kept["last"], kept["peak"]
            leap = kept["rows"] > 1 and last > 0 and rate > self.jump * last and rate > 1.01 * peak and not self._foreseen(name, step, rate)
            text = f"the learning rate leaps from {last:.3g} to {rate:.3g} in one step"
            yield from self._once(kept, "jump", leap, name, step, text, Severity.WARNING, rate, f"{self.jump:g} times", back=last)
            kept.update(last=rate, peak=max(peak, rate), rows=kept["rows"] + 1)
            yield from self._range(name, step, rate, kept)

    def _once(self, kept: dict[str, Any], kind: str, holds: bool, name: str, step: int, text: str, level: Severity, rate: float, limit: str,
              first: int | None = None, back: float = 0.0) -> Iterable[Finding]:  # fmt: skip
        if not holds:
            if kind in kept["told"] and kind != "jump":
                kept["told"].remove(kind)
            return
        if kind in kept["told"] and kind != "jump":
            return
        if kind not in kept["told"]:
            kept["told"].append(kind)
        fixes = (f"keep the rate at {back:.3g}, or raise it over many steps", *self.fixes) if back else self.fixes
        yield self.finding(
            step,
            text,
            first_step=first,
            subjects=[name],
            where=f"learning rate of {name}",
            severity=level,
            evidence={"learning rate": rate, "peak before": kept["peak"]} | ({"rate before": back} if back else {}),
            threshold=limit,
            fixes=fixes,
        )

    def _range(self, name: str, step: int, rate: float, kept: dict[str, Any]) -> Iterable[Finding]:
        optimizer = self._optimizer.get(name)
        if optimizer is None or "range" in kept["told"] or rate == 0:
            return
        effective = rate / (1 - optimizer.momentum) if 0 <= optimizer.momentum < 1 else rate
        high = optimizer.family == "adam" and rate > self.adam_high * 1.000001
        low = optimizer.family == "adam" and kept["rows"] == self.zeros and max(kept["peak"], self._planned(name)) < self.adam_low
        fast = optimizer.family == "sgd" and effective > self.sgd_high * 1.000001
        if high or low or fast:
            kept["told"].append("range")
            limit = f"{self.adam_low:g} to {self.adam_high:g}" if not fast else f"{self.sgd_high:g}, as lr/(1-momentum)"
            usual = "1e-3" if not fast else f"{0.1 * (1 - optimizer.momentum):.1g}"
            yield self.finding(
                step,
                f"a learning rate of {rate:.3g} is unusual for {optimizer.type or optimizer.family}",
                subjects=[name],
                where=f"learning rate of {name}",
                severity=Severity.INFO,
                evidence={"learning rate": rate, "effective": effective},
                threshold=limit,
                fixes=(f"try {usual}", *self.fixes),
            )

    def _planned(self, name: str) -> float:
        curve = self._curve.get(name)
        return float(np.nanmax(curve)) if curve is not None else 0.0

    def _foreseen(self, name: str, step: int, rate: float) -> bool:
        curve = self._curve.get(name)
        return curve is not None and any(abs(float(near) - rate) <= 1e-3 * rate for near in curve[max(0, step - 1) : step + 2])

    def _ended(self, name: str, step: int, kept: dict[str, Any]) -> bool:
        """Is the rate 0 because a decay came to its end: foreseen, late in the run, or reached from a small fraction of the peak?"""
        planned = self._facts.planned_steps
        late = planned is not None and kept["from"] >= 0.9 * planned
        curve = self._curve.get(name)
        foreseen = curve is not None and step < len(curve) and float(curve[step]) == 0 and kept["peak"] > 0
        return bool(late or foreseen or 0 < kept.get("before zero", 0.0) <= 0.05 * kept["peak"])

    def state_dict(self) -> dict[str, Any]:
        """Each group's course so far."""
        return {"groups": {name: {**kept, "told": list(kept["told"]), "last": str(kept["last"])} for name, kept in self._groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._groups = {name: {**kept, "told": list(kept["told"]), "last": float(kept["last"])} for name, kept in state["groups"].items()}

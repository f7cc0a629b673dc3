"""From rows of runs to figures: which alarms were right, with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.detection.harm import harmed

ALARM = ("warning", "error", "fatal")
LEVEL = 0.95
Row = Mapping[str, Any]


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: good in the middle, too short at 0 and 1."""
    if of == 0:
        return 0.0, 1.0
    z, share = 1.959963984540054, hits / of
    centre, spread = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, (centre - spread) / (1 + z * z / of)), min(1.0, (centre + spread) / (1 + z * z / of))


def clopper_pearson(hits: int, of: int) -> tuple[float, float]:
    """The exact 95 % interval of a share; what is given for shares near 0 or 1."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else _solve(lambda share: 1 - _binomial(hits - 1, of, share) - tail, 0.0, 1.0)
    high = 1.0 if hits == of else _solve(lambda share: tail - _binomial(hits, of, share), 0.0, 1.0)
    return low, high


def poisson(events: int) -> tuple[float, float]:
    """Garwood's exact 95 % interval of a Poisson mean."""
    tail, most = (1 - LEVEL) / 2, 10.0 + 4 * events
    low = 0.0 if events == 0 else _solve(lambda mean: 1 - _poisson(events - 1, mean) - tail, 0.0, most)
    return low, _solve(lambda mean: tail - _poisson(events, mean), 0.0, most)


def _binomial(hits: int, of: int, share: float) -> float:
    return sum(math.comb(of, count) * share**count * (1 - share) ** (of - count) for count in range(hits + 1))


def _poisson(events: int, mean: float) -> float:
    return math.exp(-mean) * sum(mean**count / math.factorial(count) for count in range(events + 1))


def _solve(rising: Any, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


@dataclasses.dataclass(frozen=True)
class Share:
    """``hits`` out of ``of``."""

    hits: int
    of: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 %: Wilson's, and the exact one where fewer than 5 are on one side."""
        return (clopper_pearson if min(self.hits, self.of - self.hits) < 5 and self.of else wilson)(self.hits, self.of)

    def __str__(self) -> str:
        if self.of == 0:
            return "no data"
        low, high = self.interval
        return f"{self.hits / self.of:.3f} ({self.hits}/{self.of}, 95 % {low:.3f} to {high:.3f})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"hits": self.hits, "of": self.of, "value": self.hits / self.of if self.of else None, "interval": list(self.interval)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one faulty run shows. ``delay`` is in steps from the fault's first one; None where it was not diagnosed."""

    counted: bool
    harmed: bool
    alarmed: bool
    diagnosed: bool
    family: bool
    headline: bool
    delay: int | None
    understood: bool
    fixed: bool


def alarms(row: Row) -> list[Mapping[str, Any]]:
    """The headlines that are at least a warning."""
    return [finding for finding in row["findings"] if finding["severity"] in ALARM]


def learnt(row: Row) -> bool:
    """Did a healthy run reach what its recipe promises?"""
    return row["score"] is not None and row["score"] >= row["learnt"] and not row["crash"]


def judge(row: Row, healthy: Row | None) -> Verdict:
    """A fault counts when it did measurable harm or is one by construction, and when its healthy twin has learnt."""
    usable = healthy is not None and learnt(healthy)
    reference = healthy["score"] if usable and healthy is not None else 0.0
    score = math.nan if row["score"] is None else row["score"]
    hurt = usable and (harmed(score, reference) or bool(row["crash"]))
    told = alarms(row)
    right = [
        finding
        for head in row["findings"]
        for finding in (head, *head["consequences"])
        if finding["severity"] in ALARM and finding["code"] in row["right"]
    ]
    first = told[0] if told else None
    family = first is not None and first["code"] in row["right"]
    better = row.get("fixed_score")
    return Verdict(
        counted=usable and (hurt or row["structural"]),
        harmed=hurt,
        alarmed=bool(told),
        diagnosed=bool(right),
        family=family,
        headline=bool(family and first is not None and first["place"]),
        delay=min((max(0, finding["step"] - row["onset"]) for finding in right), default=None),
        understood=bool(row.get("understood")),
        fixed=usable and better is not None and not harmed(better, reference),
    )


def twins(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    """The healthy rows by framework, recipe and seed."""
    return {(row["framework"], row["recipe"], row["seed"]): row for row in rows if not row["operator"]}


def summary(rows: Sequence[Row], healthy: Mapping[tuple[str, str, int], Row] | None = None) -> dict[str, Any]:
    """All figures of some rows. ``healthy``: where the faulty rows' twins are, if not among them."""
    usable = [row for row in rows if "skipped" not in row]
    pairs = twins(row for row in usable) if healthy is None else healthy
    well = [row for row in usable if not row["operator"] and learnt(row) and row["steps"]]  # silence over steps nobody looked at is no good sign
    judged = [(row, judge(row, pairs.get((row["framework"], row["recipe"], row["seed"])))) for row in usable if row["operator"]]
    counted = [(row, verdict) for row, verdict in judged if verdict.counted]
    hurt = [verdict for _, verdict in counted if verdict.harmed]
    false = sum(len(alarms(row)) for row in well)
    steps = sum(row["steps"] for row in well)
    heads = [(row, finding) for row, _ in counted for finding in alarms(row)]
    right = sum(finding["code"] in row["right"] for row, finding in heads)
    delays = sorted(verdict.delay for _, verdict in counted if verdict.delay is not None)
    low, high = poisson(false)
    return {
        "healthy runs": len(well),
        "healthy runs with an alarm": Share(sum(bool(alarms(row)) for row in well), len(well)),
        "false alarms": false,
        "healthy steps": steps,
        "false alarms per 1,000 steps": [1000 * number / steps if steps else None for number in (false, low, high)],
        "faults counted": len(counted),
        "precision of headlines": Share(right, len(heads) + false),
        "alarmed": Share(sum(verdict.alarmed for _, verdict in counted), len(counted)),
        "recall": Share(sum(verdict.diagnosed for _, verdict in counted), len(counted)),
        "first headline of the right family": Share(sum(verdict.family for _, verdict in counted), len(counted)),
        "first headline right, with its place": Share(sum(verdict.headline for _, verdict in counted), len(counted)),
        "steps to detection, median": delays[len(delays) // 2] if delays else None,
        "steps to detection, 90 %": delays[math.ceil(0.9 * len(delays)) - 1] if delays else None,
        "first advice is an action": Share(sum(verdict.understood for verdict in hurt), len(hurt)),
        "first advice makes the run train": Share(sum(verdict.fixed for verdict in hurt), len(hurt)),
        "not learnt": sum(not row["operator"] and not learnt(row) for row in usable),
        "faults without harm, not counted": len(judged) - len(counted),
        "runs of which nothing was observed": sum(not row["steps"] and not row["crash"] for row in usable),
        "errors inside trainvet": sum(bool(row["errors"]) for row in usable),
    }

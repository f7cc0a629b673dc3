"""LR101: a learning rate that cannot be meant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Optimizer, Schedule, Snapshot

EDGE = 1.000001  # a rate of 0.1 with momentum 0.9 is an effective rate of 1
NEW: dict[str, Any] = {
    "rows": 0, "applied": 0, "last": 0.0, "peak": 0.0, "alive": -1, "zeros": 0, "from": 0, "before": 0.0, "wrong": False, "odd": False,
}  # fmt: skip


@dataclasses.dataclass
class ImplausibleLearningRate(Rule):
    """
    ## What it checks
    Error: a rate that is NaN, infinite or negative; a rate of exactly 0 for ``zeros`` applied steps that is not the end of a decay. Warning: a rate
    that grows more than ``jump`` times from one step to the next, to a height that was neither seen before nor planned by the schedule. Information:
    a rate outside 1e-7 to 1e-2 with Adam and its kin, or an effective rate lr/(1-momentum) above 1 with SGD.
    ## Why it matters
    The rate is the number that ruins most runs, and a schedule or a callback can change it without a word.
    ## What to do
    Look at what sets the rate: schedule, callback, configuration.
    ## Known limits
    Downward steps are normal (the end of a one-cycle schedule falls elevenfold), and so is the change after a group's first step. 0 ends a decay
    late in the run, where the schedule says so, or after less than 5 % of the peak. A group at 0 from its first step beside groups that train is
    taken for a way to freeze it: information. A rate on a device is not read at every step.
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
        self._planned_steps: int | None = None
        self._optimizer: dict[str, Optimizer] = {}
        self._schedule: dict[str, Schedule] = {}
        self._groups: dict[str, dict[str, Any]] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Each group's optimizer and planned rates."""
        self._planned_steps = facts.planned_steps
        self._optimizer = {group: optimizer for optimizer in facts.optimizers for group in optimizer.groups}
        self._schedule = {schedule.group: schedule for schedule in facts.schedules if np.isfinite(schedule.curve).any()}
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Go through the rows of a block, unless all of them are positive and none is above what was seen before."""
        tracks = snapshot.tracks("optimizer.learning_rate")
        for name, track in tracks.items():
            kept = self._groups.setdefault(name, dict(NEW))
            if kept["alive"] < 0 and bool((track.values > 0).any()):
                kept["alive"] = int(track.steps[track.values > 0][0])
        for name, track in tracks.items():
            kept, rates = self._groups[name], track.values
            if kept["rows"] >= self.zeros and bool(((rates > 0) & (rates <= kept["peak"])).all()):
                kept.update(rows=kept["rows"] + len(rates), applied=int(track.applied[-1]), last=float(rates[-1]), zeros=0, wrong=False)
                continue
            for step, applied, rate in zip(track.steps.tolist(), track.applied.tolist(), rates.tolist(), strict=True):
                yield from self._judge(name, kept, step, applied, rate)

    def _judge(self, name: str, kept: dict[str, Any], step: int, applied: int, rate: float) -> Iterable[Finding]:
        moved, last, peak, wrong = applied > kept["applied"], kept["last"], kept["peak"], not (math.isfinite(rate) and rate >= 0)
        told, kept["wrong"], kept["applied"] = kept["wrong"], wrong, applied
        if wrong:
            if not told:
                yield self._found(name, step, rate, f"the learning rate is {rate:g}", Severity.ERROR, "a finite rate of at least 0", before=last)
            return
        kept.update(rows=kept["rows"] + 1, last=rate, peak=max(peak, rate), zeros=kept["zeros"] if rate == 0 else 0)
        schedule = self._schedule.get(name)
        planned = float(np.nanmax(schedule.curve)) if schedule is not None else 0.0
        if rate == 0 and moved:
            kept.update({"zeros": kept["zeros"] + 1} | ({} if kept["zeros"] else {"from": step, "before": last}))
            if kept["zeros"] == self.zeros and not self._ended(name, step, kept):
                others = any(0 <= other["alive"] <= step for group, other in self._groups.items() if group != name)
                level = Severity.ERROR if peak > 0 else Severity.INFO if others else Severity.WARNING if planned > 0 else Severity.ERROR
                text, limit = f"the learning rate has been 0 for {self.zeros} applied steps", f"{self.zeros} applied steps"
                yield self._found(name, step, rate, text, level, limit, first_step=kept["from"], before=kept["before"])
        elif kept["rows"] > 2 and rate > self.jump * last > 0 and rate > 1.01 * max(peak, planned):
            text, limit = f"the learning rate leaps from {last:.3g} to {rate:.3g} in one step", f"{self.jump:g} times, above the highest before"
            fix = f"keep the rate at {last:.3g}, or raise it over many steps"
            yield self._found(name, step, rate, text, Severity.WARNING, limit, fix, before=last)
        yield from self._range(name, kept, step, rate, kept["rows"] == self.zeros and rate <= last and planned < self.adam_low)

    def _range(self, name: str, kept: dict[str, Any], step: int, rate: float, settled: bool) -> Iterable[Finding]:
        optimizer = self._optimizer.get(name, Optimizer(""))
        share = 1 - optimizer.momentum if optimizer.family == "sgd" and 0 <= optimizer.momentum < 1 else 1.0
        if optimizer.family == "sgd":
            odd, limit, usual = rate / share > self.sgd_high * EDGE, f"{self.sgd_high:g}, as learning rate/(1-momentum)", f"{0.1 * share:.1g}"
        else:
            odd = rate > self.adam_high * EDGE or (settled and 0 < kept["peak"] < self.adam_low)
            odd, limit, usual = odd and optimizer.family == "adam", f"{self.adam_low:g} to {self.adam_high:g}", "1e-3"
        if odd and not kept["odd"]:
            kept["odd"] = True
            text = f"a learning rate of {rate:.3g} is unusual for {optimizer.type or optimizer.family}"
            yield self._found(name, step, rate, text, Severity.INFO, limit, f"try {usual}")

    def _found(self, name: str, step: int, rate: float, text: str, level: Severity, limit: str, *fix: str, first_step: int | None = None,
               before: float = 0.0) -> Finding:  # fmt: skip
        source = f"look at what {self._schedule[name].type} gives at this step" if name in self._schedule else self.fixes[0]
        return self.finding(
            step,
            text,
            first_step=first_step,
            subjects=[name],
            where=f"learning rate of {name}",
            severity=level,
            evidence={"learning rate": rate} | ({"rate before": before} if before else {}),
            threshold=limit,
            fixes=(*fix, source),
        )

    def _ended(self, name: str, step: int, kept: Mapping[str, Any]) -> bool:
        """Is the rate 0 because a decay came to its end?"""
        curve = self._schedule[name].curve if name in self._schedule else ()
        late = self._planned_steps is not None and kept["from"] >= 0.9 * self._planned_steps
        return bool(kept["peak"] > 0 and (late or (step < len(curve) and curve[step] == 0) or 0 < kept["before"] <= 0.05 * kept["peak"]))

    def state_dict(self) -> dict[str, Any]:
        """Each group's course so far."""
        return {"groups": {name: dict(kept) for name, kept in self._groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._groups = {name: dict(kept) for name, kept in state["groups"].items()}

"""LR102: the learning-rate schedule does not fit the length of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Schedule

ACTING = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "PolynomialLR", "LinearLR")


@dataclasses.dataclass
class MismatchedSchedule(Rule):
    """
    ## What it checks
    The schedule is driven ahead to the end of the planned run. It warns where the run covers less than ``least`` or more than ``most`` of the
    schedule's own length; where a decaying schedule never changes the rate; and where the rate has fallen below ``vanished`` of its peak before
    half of the run is over.
    ## Why it matters
    A schedule that is stepped per epoch but counted in steps (or the other way round) never decays, stays in its warm-up, or ends training early.
    ## What to do
    Compare the schedule's length with the number of optimizer steps: accumulation, several devices and the epoch setting all count.
    ## Known limits
    Schedules that restart or follow a metric are not judged, nor are those whose end is not known (a function of the step) unless they vanish. Needs
    the planned number of steps.
    """

    code = "LR102"
    reads: ClassVar[frozenset[str]] = frozenset()
    severity: ClassVar[Severity] = Severity.WARNING
    causes = (
        "the schedule is stepped per epoch but its length is given in steps, or the other way round",
        "its length was computed from another loader, batch size or number of epochs",
        "gradient accumulation was not counted",
    )
    fixes = ("use the trainer's own estimate of its optimizer steps as the schedule's length",)

    least: float = 0.5
    most: float = 1.5
    vanished: float = 1e-4

    def __post_init__(self) -> None:
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge every simulated schedule once."""
        fresh = [schedule for schedule in facts.schedules if schedule.group not in self._told]
        found: dict[str, list[Schedule]] = {}
        for schedule in fresh:
            what = self._fault(schedule)
            if what:
                found.setdefault(what, []).append(schedule)
                self._told.add(schedule.group)
        for what, schedules in found.items():
            first = schedules[0]
            steps = len(first.curve)
            evidence: dict[str, float | int | str] = {
                "planned steps": steps,
                "first rate": float(first.curve[0]),
                "peak": float(np.nanmax(first.curve)),
                "last rate": float(first.curve[-1]),
                "interval": first.interval,
            }
            if first.horizon is not None:
                evidence["schedule's length"] = first.horizon
            yield self.finding(
                0,
                what,
                subjects=[schedule.group for schedule in schedules],
                where=f"learning-rate schedule {first.type} of {', '.join(schedule.group for schedule in schedules)}",
                evidence=evidence,
                threshold=f"{self.least:.0%} to {self.most:.0%} of the schedule's length",
                fixes=(*self._advice(first, steps), *self.fixes),
            )

    def _fault(self, schedule: Schedule) -> str:
        steps = len(schedule.curve)
        if schedule.reactive or schedule.restarts or steps < 2:
            return ""
        peak = float(np.nanmax(schedule.curve))
        if schedule.horizon is not None:
            share = steps / max(schedule.horizon, 1e-9)
            if share < self.least:
                return f"the run ends after {steps} optimizer steps, {share:.2g} of the {schedule.horizon:.0f} that {schedule.type} is made for"
            if share > self.most:
                return f"{schedule.type} is through after {schedule.horizon:.0f} of {steps} optimizer steps"
        if schedule.type in ACTING and bool(np.ptp(schedule.curve) <= 1e-12 * peak):
            return f"{schedule.type} never changes the learning rate within the {steps} optimizer steps of the run"
        half = float(schedule.curve[steps // 2])
        if not half >= self.vanished * peak:
            through = int(np.argmax(schedule.curve < self.vanished * peak))
            return f"{schedule.type} is through at step {through} of {steps}: the learning rate is down to {half:.1g} (peak {peak:.2g}) half-way"
        return ""

    @staticmethod
    def _advice(schedule: Schedule, steps: int) -> tuple[str, ...]:
        slow = schedule.horizon is None or steps < schedule.horizon
        vanishes = float(schedule.curve[steps // 2]) < 0.1 * float(np.nanmax(schedule.curve))
        other = "step" if slow and not vanishes else "epoch"
        if schedule.interval != other:
            return (f"step the schedule once per {other}: it is stepped per {schedule.interval} now", f"or make it {steps} optimizer steps long")
        return (f"make the schedule {steps} optimizer steps long",)

    def state_dict(self) -> dict[str, Any]:
        """Which groups were told."""
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])

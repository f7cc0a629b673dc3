"""LR102: the learning-rate schedule does not fit the length of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Schedule, Vector

DECAYING = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "OneCycleLR", "PolynomialLR", "LinearLR")
DECAYING_KERAS = ("CosineDecay", "ExponentialDecay", "InverseTimeDecay", "PiecewiseConstantDecay", "PolynomialDecay")
STAIRS = ("MultiStepLR", "PiecewiseConstantDecay")  # a last step down is no end


@dataclasses.dataclass
class MismatchedSchedule(Rule):
    """
    ## What it checks
    The schedule is driven ahead to the end of the planned run. It warns where the run covers less than ``least`` or more than ``most`` of the
    schedule's own length; where a decaying schedule never changes the rate; and where the rate has fallen below ``vanished`` of its peak for good
    before half of the run is over.
    ## Why it matters
    A schedule that is stepped per epoch but counted in steps (or the other way round) never decays, stays in its warm-up, or ends training early.
    ## What to do
    Compare the schedule's length with the number of optimizer steps: accumulation, several devices and the epoch setting all count.
    ## Known limits
    Schedules that restart or follow a metric are not judged, nor are those whose end is not known (a function of the step) unless they vanish. A
    schedule that ends early at a constant rate above ``floor`` of its peak is taken to be meant so. Needs the planned number of steps, and a run
    from its start.
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
    floor: float = 0.1

    def __post_init__(self) -> None:
        self._judged: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge each group's schedule once, when it is first seen; groups with the same fault share a finding."""
        found: dict[tuple[str, bool], list[Schedule]] = {}
        for schedule in facts.schedules if not facts.resumed else ():
            if schedule.group not in self._judged and len(schedule.curve) > 1 and not (schedule.reactive or schedule.restarts):
                self._judged.add(schedule.group)
                for fault in self._faults(schedule, schedule.curve):
                    found.setdefault(fault, []).append(schedule)
        for (what, short), schedules in found.items():
            first, groups = schedules[0], [schedule.group for schedule in schedules]
            curve, length = first.curve, {} if first.horizon is None else {"schedule's length": float(first.horizon)}
            rates = {"first rate": curve[0], "peak": curve.max(), "half-way": curve[len(curve) // 2], "last rate": curve[-1]}
            evidence: dict[str, float | int | str | bool] = {"optimizer steps": len(curve), "stepped per": first.interval, **length}
            yield self.finding(
                0,
                what,
                subjects=groups,
                where=f"learning-rate schedule {first.type} of {', '.join(groups)}",
                evidence=evidence | {key: float(rate) for key, rate in rates.items()},
                threshold=f"{self.least:.0%} to {self.most:.0%} of the schedule's length, {self.vanished:g} of the peak half-way",
                fixes=(*advice(first, short), *self.fixes),
            )

    def _faults(self, schedule: Schedule, curve: Vector) -> Iterator[tuple[str, bool]]:
        """What is wrong and whether the run is too short for the schedule; at most one thing."""
        kind, steps, peak = schedule.type, len(curve), float(curve.max())
        if not (np.isfinite(curve).all() and peak > 0):
            return  # the rates themselves are LR101's
        length = np.inf if schedule.horizon is None or kind in STAIRS else max(float(schedule.horizon), 1.0)
        last = int(np.flatnonzero(curve >= self.vanished * peak)[-1])
        if np.isfinite(length) and steps < self.least * length:
            yield f"the run ends after {steps} optimizer steps, {steps / length:.2g} of the {length:.0f} that {kind} is made for", True
        elif kind in DECAYING + DECAYING_KERAS and float(np.ptp(curve)) <= 1e-12 * peak:
            yield f"the schedule {kind} never changes the learning rate within the {steps} optimizer steps of the run", True
        elif steps > self.most * length and not self._rests(curve[int(length) :], peak):
            yield f"the schedule {kind} is through after {length:.0f} of {steps} optimizer steps", False
        elif last + 1 < steps / 2:
            yield (
                f"the schedule {kind} has taken the learning rate below {self.vanished:g} of its peak after {last + 1} of {steps} optimizer steps",
                False,
            )

    def _rests(self, rest: Vector, peak: float) -> bool:
        return bool(rest.min() > self.floor * peak and np.ptp(rest) <= 1e-9 * peak)

    def state_dict(self) -> dict[str, Any]:
        """Which groups were judged."""
        return {"judged": sorted(self._judged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._judged = set(state["judged"])


def advice(schedule: Schedule, short: bool) -> tuple[str, ...]:
    """How schedule and run can be made to fit."""
    steps, wrong = len(schedule.curve), "epoch" if short else "step"
    length = f"make it {steps} optimizer steps long" + (f" (now {schedule.horizon:.0f})" if schedule.horizon is not None else "")
    if schedule.interval != wrong:
        return (length,)
    return (
        f"step the schedule after every {'optimizer step' if short else 'epoch'}: it is stepped after every {schedule.interval} now",
        f"or {length}",
    )

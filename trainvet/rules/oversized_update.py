"""WT105: updates that stay large compared with the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import READS, Matrices, median
from trainvet.rule import Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector

AIM = 3e-3  # of the weight: in the middle of what is healthy, 1e-3 to 0.01


@dataclasses.dataclass
class OversizedUpdate(Rule):
    """
    ## What it checks
    After ``after`` applied steps, on ``patience`` samples in a row: the median over matrices of ‖update‖/‖weight‖ above ``median``, or one matrix
    above ``single``. With fewer than 3 matrices only: one of them above ``few``. An error above ``error``.
    ## Why it matters
    Weights that are replaced every few steps remember nothing; the loss oscillates or runs away.
    ## What to do
    A healthy step is 1e-3 to 0.01 of the weight: lower the learning rate accordingly, of the named matrices' group or of all.
    ## Known limits
    Matrices with an RMS below 1e-3 do not count. Largest healthy values measured: median 0.043, one matrix 0.092.
    """

    code = "WT105"
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate"}
    causes = ("learning rate too high", "weight decay or a penalty shrinks the weights", "exploding gradients without clipping")
    fixes = (
        "lower the learning rate by the factor between the measured ratio and 3e-3",
        "clip the gradient norm to 1.0",
        "lower the weight decay if the weights shrink",
    )

    median: float = 0.07
    single: float = 0.5
    few: float = 1.0
    error: float = 1.0
    patience: int = 3
    after: int = 20
    floor: float = 1e-3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices = Matrices()
        self._rate = LearningRate()
        self._warned, self._severe = Streak(self.patience), Streak(self.patience)
        self._told = self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices count."""
        self._facts = facts
        self._matrices.begin(facts)
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample: all matrices by their median, then each one; a warning may be followed by one error."""
        self._rate.follow(snapshot)
        names, ratios, before = self._matrices.ratios(snapshot)
        if snapshot.applied <= self.after or not len(names):
            return
        enough = before >= self.floor
        if not enough.all():
            names, ratios = tuple(name for name, kept in zip(names, enough, strict=True) if kept), ratios[enough]
        if not names:
            return
        self._samples += 1
        many = len(names) >= 3
        rows = ("median", *names)
        values = np.concatenate([[median(ratios) if many else 0.0], ratios])
        limits = np.full(len(values), self.single if many else self.few)
        limits[0] = self.median
        calm = values < limits / 2
        warned = self._warned.update(rows, values > limits, snapshot.step, clear=calm)
        severe = self._severe.update(rows, values > np.maximum(limits, self.error), snapshot.step, clear=calm)
        if calm.all():
            self._told = 0
        severity = Severity.ERROR if severe else Severity.WARNING if warned else 0
        if severity > self._told:
            self._told = severity
            yield self._tell(snapshot, Severity(severity), [rows[index] for index in severe or warned], names, ratios, float(limits[1]))

    def _tell(self, snapshot: Snapshot, severity: Severity, due: list[str], names: tuple[str, ...], ratios: Vector, single: float) -> Finding:
        spread = due[0] == "median"
        limit = self.median if spread else single
        over = [name for name, ratio in zip(names, ratios, strict=True) if ratio > limit and (spread or name in due)]
        size = median(ratios) if spread else float(max(ratio for name, ratio in zip(names, ratios, strict=True) if name in over))
        streak = self._severe if severity is Severity.ERROR else self._warned
        what = f"the median over {len(names)} matrices" if spread else f"{over[int(np.argmax([ratios[names.index(name)] for name in over]))]}"
        return self.finding(
            snapshot.step,
            f"each step{self._rate.stated(over)} moves the weights by {size:.2g} of their size ({what})",
            first_step=min(streak.first(name) for name in due),
            subjects=self._facts.upstream_first(over),
            severity=severity,
            evidence={"update ratio": size, "largest": float(ratios.max()), "matrices": len(names)},
            threshold=f"{limit:g}, error above {max(limit, self.error):g}",
            fixes=(self._rate.advice(AIM / size, over), *self.fixes[1:]),
        )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples after step {self.after}"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        kept = {"told": int(self._told), "samples": self._samples, "rate": self._rate.state_dict()}
        return {**kept, "warned": self._warned.state_dict(), "severe": self._severe.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._samples = int(state["told"]), int(state["samples"])
        self._rate.load_state_dict(state["rate"])
        self._warned.load_state_dict(state["warned"])
        self._severe.load_state_dict(state["severe"])

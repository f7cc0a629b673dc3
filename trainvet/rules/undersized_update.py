"""WT106: updates so small that the weights hardly move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.learning_rate import LearningRate
from trainvet.matrices import READS, Matrices, median
from trainvet.rule import Rule, Streak
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UndersizedUpdate(Rule):
    """
    ## What it checks
    After ``after`` applied steps, on ``patience`` samples in a row: the median over matrices of ‖update‖/‖weight‖ below ``median`` while the learning
    rate is at least ``share`` of its peak and does not rise.
    ## Why it matters
    At 1e-5 per step in one direction a weight needs 100,000 steps to move by its own size: the run looks busy and learns nothing.
    ## What to do
    Raise the learning rate to the one named. It aims at updates of 0.01 of the weight under Adam and its like, 3e-3 otherwise, and is at most 0.01
    and 1. Where it is there already, the gradients are too small: look at GR102 and at the activations.
    ## Known limits
    Matrices without a gradient on the sample (idle experts, GR104) and with an RMS below 1e-3 do not count. Silent where fewer than 3 matrices train
    beside at least as many frozen ones, and where the rate is not known. Smallest healthy median measured: 9e-5.
    """

    code = "WT106"
    reads: ClassVar[frozenset[str]] = READS | {"gradient.rms", "optimizer.learning_rate"}
    causes = ("learning rate too low", "gradients vanish before they reach the weights", "the weights have grown: an earlier step was far too large")
    fixes = ("raise the learning rate by the factor between the measured ratio and a healthy one", "check that every part receives a gradient")

    median: float = 1e-5
    share: float = 0.5
    patience: int = 5
    after: int = 10
    floor: float = 1e-3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices = Matrices()
        self._rate = LearningRate()
        self._streak = Streak(self.patience)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices count."""
        self._facts = facts
        self._matrices.begin(facts)
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample; one with a rate that is low or rising ends the streak."""
        self._rate.follow(snapshot)
        names, ratios, before = self._matrices.ratios(snapshot)
        few = self._matrices.trainable < 3 and self._matrices.frozen >= self._matrices.trainable
        if snapshot.applied <= self.after or not names or few:
            return
        moving = (before >= self.floor) & ~(self._matrices.rows.values(snapshot, "gradient.rms") == 0)
        settled = self._rate.settled(names, self.share)
        keep = moving & settled
        middle = median(ratios[keep]) if keep.any() else np.nan
        self._samples += bool(keep.any())
        calm = middle > 2 * self.median
        if self._streak.update(("median",), np.array([middle < self.median]), snapshot.step, clear=np.array([calm])):
            chosen = [name for name, kept in zip(names, keep, strict=True) if kept]
            yield self.finding(
                snapshot.step,
                f"each step moves the weights by only {middle:.1g} of their size (median over {len(chosen)} matrices)",
                first_step=self._streak.first("median"),
                subjects=self._facts.upstream_first(name for name, ratio in zip(chosen, ratios[keep], strict=True) if ratio < self.median),
                evidence={"update ratio": middle, "learning rate": float(self._rate.of(chosen).max()), "matrices": len(chosen)},
                threshold=f"{self.median:g}",
                fixes=self._advice(middle, chosen),
            )

    def _advice(self, ratio: float, names: list[str]) -> tuple[str, ...]:
        """The rate that makes the updates healthy, first; where it would be too high for any model, the rate is not what is wrong."""
        adam = any(item.family == "adam" and not set(names).isdisjoint(item.parameters) for item in self._facts.optimizers)
        aim, highest = (0.01, 0.01) if adam else (3e-3, 1.0)
        room = highest / float(np.nanmax(self._rate.of(names)))
        factor = min(aim / ratio, room) if ratio > 0 else room
        return (self._rate.advice(factor, names), self.fixes[1]) if factor >= 2 else (self.fixes[1],)

    def missing(self) -> str:
        """How many samples there were."""
        wanted = f"{self.patience} samples with a settled learning rate after step {self.after}"
        return "" if self._samples >= self.patience else f"{self._samples} of {wanted}"

    def state_dict(self) -> dict[str, Any]:
        """The running streak."""
        return {"streak": self._streak.state_dict(), "rate": self._rate.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state["streak"])
        self._rate.load_state_dict(state["rate"])
        self._samples = int(state["samples"])

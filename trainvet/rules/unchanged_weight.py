"""WT101: a weight that receives gradients, belongs to an optimizer, and never moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot

SAMPLED = 1024  # elements of a tensor that a probe compares
SPARSE = 0.9  # share of zero gradients beyond which the compared elements may all be untouched ones
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # a smaller relative change may be lost


@dataclasses.dataclass
class UnchangedWeight(Rule):
    """
    ## What it checks
    No compared element of a weight changed on ``patience`` samples with a learning rate above 0, although its gradient's RMS exceeds ``share`` of the
    median over all weights that have one. Equality is exact: a small change is a change. The first 10 steps count as samples.
    ## Why it matters
    Part of the model does not train while the loss still falls, so the curve looks healthy.
    ## What to do
    See whether the step reaches this very tensor: its optimizer group, its rate, and whether the update is lost in rounding.
    ## Known limits
    Silent for frozen weights, weights without an optimizer (WT102) or without a gradient (GR104), large tables of which a step touches few rows, and
    where the rate, times an update of 1, is below what the weight's type can add: that is no matter of one weight (WT103, WT106, LR101, LR102).
    At most INFO for a bias in front of a normalisation layer (it has no effect) and for a scalar (often clamped on purpose).
    """

    code = "WT101"
    severity = Severity.ERROR
    reads: ClassVar[frozenset[str]] = frozenset({"update.unchanged", "gradient.rms", "gradient.zero_share", "weight.rms", "optimizer.learning_rate"})
    causes = ("the optimizer steps a copy of the tensor, not the one in the model", "something writes the old value back after each step")
    fixes = ("build the optimizer after the model is final (moved, wrapped, loaded)", "give the tensor to an optimizer group with a rate above 0")

    patience: int = 20
    share: float = 1e-3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._large: frozenset[str] = frozenset()
        self._mild: frozenset[str] = frozenset()
        self._ulp: dict[str, float] = {}
        self._rate = LearningRate()
        self._streak = Streak(self.patience)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which weights could move, and which of them are compared in part only."""
        self._facts = facts
        self._rate.begin(facts)
        parameters, owned = facts.parameters, facts.owned
        self._large = frozenset(name for name, subject in parameters.items() if subject.numel > SAMPLED)
        self._ulp = {name: HALF_ULP.get(subject.dtype, 0.0) for name, subject in parameters.items()}
        self._mild = frozenset(name for name, subject in parameters.items() if subject.role == "bias-before-norm" or subject.numel == 1)
        movable = {name: subject for name, subject in parameters.items() if subject.trainable and (not owned or name in owned)}
        self._rows.choose(name for name, subject in movable.items() if subject.role != "embedding" or name not in self._large)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count each weight's samples without a change; samples that cannot speak for it are left out."""
        self._rate.follow(snapshot)
        column = snapshot.column("update.unchanged")
        if column is None or not self._rows.find(column[0]):
            return
        names, still, size = self._rows.names, self._rows.values(snapshot, "update.unchanged") == 1, self._rows.values(snapshot, "gradient.rms")
        moving = size > 0
        rates = self._rate.of(names)
        if not moving.any() or not np.any(rates > 0):
            return
        self._samples += 1
        if not still.any() and not self._streak.longest():
            return
        sparse = self._rows.values(snapshot, "gradient.zero_share") > SPARSE
        felt = ~(rates < np.array([self._ulp[name] for name in names]) * self._rows.values(snapshot, "weight.rms"))
        speaks = np.flatnonzero((rates > 0) & felt & ~(sparse & np.array([name in self._large for name in names])))
        holds = still & (size > self.share * median(size[moving]))
        due = self._streak.update(tuple(names[row] for row in speaks), holds[speaks], snapshot.step)
        for mild in (False, True):
            concerned = self._facts.upstream_first(name for name in (names[speaks[row]] for row in due) if (name in self._mild) == mild)
            if concerned:
                yield self._tell(snapshot, concerned, mild)

    def _tell(self, snapshot: Snapshot, names: tuple[str, ...], mild: bool) -> Finding:
        rate = float(self._rate.of(names[:1])[0])
        size, weight = (float(snapshot.values(key, names[:1])[0]) for key in ("gradient.rms", "weight.rms"))
        causes, fixes = self._lost(names[0], rate, size, weight)
        if mild:
            causes = ["a bias in front of a normalisation layer has no effect on the loss; a scalar may be clamped on purpose"]
            fixes = ["build the layer without a bias"]
        return self.finding(
            snapshot.step,
            f"not one compared element changed on {self.patience} samples, although gradient, learning rate and optimizer are there",
            first_step=min(self._streak.first(name) for name in names),
            subjects=names,
            severity=Severity.INFO if mild else None,
            evidence={"weights": len(names), "gradient rms": size, "weight rms": weight, "learning rate": rate},
            threshold=f"a change within {self.patience} samples",
            causes=causes if mild else [*causes, *self.causes],
            fixes=fixes if mild else [*fixes, *self.fixes],
        )

    def _lost(self, name: str, rate: float, size: float, weight: float) -> tuple[list[str], list[str]]:
        """Is the update, as far as the optimizer's family tells its size, below what the number format resolves?"""
        subject = self._facts.parameters[name]
        family = next((item.family for item in self._facts.optimizers if name in item.parameters), "other")
        step = rate * size / weight if family == "sgd" and weight > 0 else np.nan  # Adam's updates have a size near 1, which the rate lets through
        if not step < HALF_ULP.get(subject.dtype, 0.0):
            return [], []
        keep = [] if subject.dtype == "float32" else ["keep float32 weights (mixed precision), or round stochastically"]
        return [f"an update of about {step:.1g} of the weight is lost in {subject.dtype} rounding"], [*keep, self._rate.advice(1e-3 / step, [name])]

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples with a learning rate above 0"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"streak": self._streak.state_dict(), "rate": self._rate.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state["streak"])
        self._rate.load_state_dict(state["rate"])
        self._samples = int(state["samples"])

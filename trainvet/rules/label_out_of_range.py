"""IN103: labels that the loss has no room for, or labels of one class only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class LabelOutOfRange(Rule):
    """
    ## What it checks
    Labels outside what the loss accepts: [0, classes) for class numbers, [0, 1] for binary cross-entropy. And whether the first ``labels`` labels are
    all of one class (a warning).
    ## Why it matters
    Binary cross-entropy with labels 1 and 2 falls below zero without bound; class numbers that are too large raise, or are silently wrong on some
    back ends.
    ## What to do
    Let class numbers start at 0 and end at classes − 1; give the last layer as many outputs as there are classes.
    ## Known limits
    Sampled batches only. What the loss is told to ignore does not count. One class only may also mean that the data are sorted.
    """

    code = "IN103"
    reads: ClassVar[frozenset[str]] = frozenset({"label.out_of_range", "label.min", "label.max", "label.classes", "label.seen"})
    severity: ClassVar[Severity] = Severity.ERROR
    sees_poison = True
    causes = ("class numbers that start at 1", "fewer outputs than classes")
    fixes = ("let class numbers start at 0: subtract their minimum", "give the last layer one output per class")

    labels: int = 500

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._seen = 0
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What the losses accept."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Every sampled batch until something was told."""
        column = snapshot.column("label.out_of_range")
        if column is not None:
            self._seen += 1
            for index in np.flatnonzero(column[1] > 0).tolist():
                if column[0][index] not in self._told:
                    self._told.add(column[0][index])
                    yield self._outside(snapshot, column[0][index], float(column[1][index]))
        column = snapshot.column("label.classes")
        if column is not None:
            seen = snapshot.values("label.seen", column[0])
            for index in np.flatnonzero((column[1] == 1) & (seen >= self.labels) & np.isfinite(seen)).tolist():
                name = column[0][index]
                if self._facts.loss_of_label(name).classes > 1 and name not in self._told:
                    self._told.add(name)
                    yield self.finding(
                        snapshot.step,
                        f"all of the first {int(seen[index])} labels are of one class",
                        first_step=0,
                        subjects=(name,),
                        severity=Severity.WARNING,
                        evidence={"labels": int(seen[index]), "classes": self._facts.loss_of_label(name).classes},
                        threshold=f"a second class within {self.labels} labels",
                        causes=("the data are sorted by class and not shuffled", "the labels are lost on the way: a constant column, a wrong join"),
                        fixes=("shuffle the training data", "look at the labels of a few batches"),
                    )

    def _outside(self, snapshot: Snapshot, name: str, count: float) -> Finding:
        loss = self._facts.loss_of_label(name)
        low, high = (float(snapshot.values(key, (name,))[0]) for key in ("label.min", "label.max"))
        top = 1 if loss.kind == "binary_cross_entropy" else max(loss.classes - 1, 0)
        shifted = low >= 1 and high == top + low
        fix = (
            f"subtract {low:g} from the labels: the loss counts from 0" if shifted else f"bring the labels into 0 to {top} (now {low:g} to {high:g})"
        )
        if not shifted and low >= 0 and loss.kind == "cross_entropy":
            fix = f"give the last layer at least {int(high) + 1} outputs (it has {loss.classes})" if np.isfinite(high) else self.fixes[1]
        return self.finding(
            snapshot.step,
            f"{count:g} labels of this batch lie outside 0 to {top}: they run from {low:g} to {high:g}",
            subjects=(name,),
            evidence={"labels": count, "smallest": low, "largest": high, "classes": loss.classes},
            threshold=f"0 to {top}",
            causes=self.causes if shifted or low < 0 else self.causes[::-1],
            fixes=(fix, *self.fixes[: 2 - int(shifted)]),
        )

    def missing(self) -> str:
        """Whether labels were counted."""
        return "" if self._seen else "a sampled batch with labels of a loss that is known"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"seen": self._seen, "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen, self._told = int(state["seen"]), set(state["told"])

"""IN110: identical inputs have different labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class ContradictoryLabels(Rule):
    """
    ## What it checks
    Among pairs of samples with identical inputs, met on sampled steps, more than ``share`` have different labels; at least ``pairs`` pairs.
    ## Why it matters
    Such labels cannot all be learnt: they put a floor under the loss, and a model that reaches it has learnt noise by heart.
    ## What to do
    Look for samples that are stored twice, for inputs that are constant, and for labels that were joined to the wrong rows.
    ## Known limits
    INFO: stochastic targets contradict themselves by nature. Pairs are found within a bounded memory of samples only, and a sample met again in a
    later epoch is a pair that agrees with itself; augmentation makes inputs differ and hides it.
    """

    code = "IN110"
    reads: ClassVar[frozenset[str]] = frozenset({"label.pairs", "label.contradictions"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("the same sample is stored with several labels", "labels are joined to the wrong inputs", "the inputs lost what tells samples apart")
    fixes = ("list the samples with identical inputs and decide on one label", "check the join of inputs and labels")

    share: float = 0.01
    pairs: int = 100

    def __post_init__(self) -> None:
        self._seen = 0.0
        self._told = False

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Both counts are those of the run so far."""
        column = snapshot.column("label.pairs")
        if column is None or self._told:
            return
        pairs = float(column[1].max()) if len(column[1]) else 0.0
        against = snapshot.values("label.contradictions", column[0])
        self._seen = max(self._seen, pairs)
        worst = int(against.argmax()) if len(against) else 0
        if not (pairs >= self.pairs and against[worst] > self.share * column[1][worst]):
            return
        self._told = True
        share = float(against[worst] / column[1][worst])
        yield self.finding(
            snapshot.step,
            f"{share:.1%} of {int(column[1][worst])} pairs with identical inputs have different labels",
            first_step=0,
            subjects=(column[0][worst],),
            evidence={"pairs": int(column[1][worst]), "contradictions": int(against[worst])},
            threshold=f"{self.share:.0%} of at least {self.pairs} pairs",
        )

    def missing(self) -> str:
        """How many pairs there were."""
        return "" if self._seen >= self.pairs else f"{int(self._seen)} of {self.pairs} pairs with identical inputs"

    def state_dict(self) -> dict[str, Any]:
        """How many pairs there were, and whether it was told."""
        return {"seen": self._seen, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen, self._told = float(state["seen"]), bool(state["told"])

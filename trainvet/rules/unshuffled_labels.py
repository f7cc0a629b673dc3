"""IN105: a batch holds far fewer classes than the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UnshuffledLabels(Rule):
    """
    ## What it checks
    The entropy of the labels in one batch against that of all labels counted so far. In ``samples`` sampled batches the median share is below
    ``share``, where a shuffled batch of that size would have at least ``expected`` of it.
    ## Why it matters
    In data sorted by class each update unlearns the class before; the loss saws, and the last classes of an epoch win.
    ## What to do
    Shuffle the training data (`shuffle=True`, a shuffle buffer larger than a class).
    ## Known limits
    Counts labels on sampled steps; while only one class has been met there is nothing to compare with. Small batches of many classes
    have a low entropy by themselves: what a shuffled batch would have is computed from the batch size. Sequences and reinforcement learning are
    ordered on purpose.
    """

    code = "IN105"
    reads: ClassVar[frozenset[str]] = frozenset({"label.batch_entropy", "label.entropy", "label.count"})
    causes = ("the training data are sorted by class and not shuffled",)
    fixes = ("shuffle the training data: shuffle=True, or a shuffle buffer larger than one class",)

    share: float = 0.5
    expected: float = 0.8
    samples: int = 20

    def __post_init__(self) -> None:
        self._shuffled = False
        self._shares: list[float] = []
        self._seen = 0
        self._first = -1
        self._told = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """A loader that shuffles cannot be unshuffled."""
        self._shuffled = facts.shuffled is True
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Keep the last batches' shares."""
        batch = snapshot.column("label.batch_entropy")
        if batch is None or len(batch[0]) != 1 or self._told:
            return
        self._seen += 1
        entropy = float(snapshot.values("label.entropy", batch[0])[0])
        count = float(snapshot.values("label.count", batch[0])[0])
        # a batch of n from K equally likely classes lacks about (K - 1) / 2n nats (Miller 1955); no more than its own logarithm
        expected = min(entropy - (np.exp(min(entropy, 50.0)) - 1) / (2 * count), np.log(count)) if count > 0 and entropy > 0 else np.nan
        if not expected >= self.expected * entropy or self._shuffled:
            return
        if not self._shares:
            self._first = snapshot.step
        self._shares = [*self._shares, float(batch[1][0]) / entropy][-self.samples :]
        if len(self._shares) < self.samples or not float(np.median(self._shares)) < self.share:
            return
        self._told = True
        middle = float(np.median(self._shares))
        yield self.finding(
            snapshot.step,
            f"a batch holds {middle:.0%} of the label entropy of the data: classes come one after another",
            first_step=self._first,
            subjects=batch[0],
            evidence={"share": middle, "batch entropy": float(batch[1][0]), "entropy": entropy},
            threshold=f"{self.share:.0%} in the median of {self.samples} batches",
        )

    def missing(self) -> str:
        """How many batches could be compared."""
        if self._shuffled or self._told:
            return ""
        return "" if len(self._shares) >= self.samples else f"{len(self._shares)} of {self.samples} batches that can be compared"

    def state_dict(self) -> dict[str, Any]:
        """The last shares."""
        return {"shares": list(self._shares), "seen": self._seen, "first": self._first, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._shares = [float(share) for share in state["shares"]]
        self._seen, self._first, self._told = int(state["seen"]), int(state["first"]), bool(state["told"])

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
    The entropy of the labels in a batch against the mean that shuffled batches of its size have (computed from all labels counted so far). Over
    the last ``samples`` sampled batches the mean is below ``share`` of that, by at least ``errors`` standard errors.
    ## Why it matters
    In data sorted by class each update unlearns the class before; the loss saws, and the last classes of an epoch win.
    ## What to do
    Shuffle the training data (`shuffle=True`, a shuffle buffer larger than a class).
    ## Known limits
    Counts labels on sampled steps. Not judged while all labels together have less than ``least`` nats (one class, or one that is nearly all),
    nor batches so small that a shuffled one has less than ``expected`` of the whole entropy. Where the loss weights classes, the entropy counted is
    not that of the labels; the share of the largest class bounds it from below. Sequences and reinforcement learning are ordered on purpose.
    """

    code = "IN105"
    reads: ClassVar[frozenset[str]] = frozenset({"label.batch_entropy", "label.entropy", "label.count", "label.classes", "label.top_share"})
    causes = ("the training data are sorted by class and not shuffled",)
    fixes = ("shuffle the training data: shuffle=True, or a shuffle buffer larger than one class",)

    share: float = 0.5
    expected: float = 0.8
    least: float = 0.3
    errors: float = 6.0
    samples: int = 20

    def __post_init__(self) -> None:
        self._shuffled = False
        self._weighted: frozenset[str] = frozenset()
        self._pairs: list[list[float]] = []  # entropy of a batch, and what a shuffled one has at least
        self._first = -1
        self._told = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """A loader that shuffles cannot be unshuffled; the losses that weight classes."""
        self._shuffled = facts.shuffled is True
        self._weighted = frozenset(loss.label for loss in facts.losses if loss.weighted)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Keep the entropies of the last batches, and judge their mean."""
        batch = snapshot.column("label.batch_entropy")
        if batch is None or len(batch[0]) != 1 or self._told or self._shuffled:
            return
        entropy, count, classes, top = (
            float(snapshot.values(key, batch[0])[0]) for key in ("label.entropy", "label.count", "label.classes", "label.top_share")
        )
        if batch[0][0] in self._weighted:
            entropy = _largest_and_rest(top)
        # the mean entropy of n labels out of K classes lies at most ln(1 + (K - 1) / n) below that of the data (Paninski 2003), for any distribution
        expected = entropy - np.log1p((classes - 1) / count) if count > 0 and classes > 1 else np.nan
        if not (entropy >= self.least and expected >= self.expected * entropy and np.isfinite(batch[1][0])):
            return
        if not self._pairs:
            self._first = snapshot.step
        self._pairs = [*self._pairs, [float(batch[1][0]), float(expected)]][-self.samples :]
        if len(self._pairs) < self.samples:
            return
        had, due = np.array(self._pairs).T
        mean, wanted = float(had.mean()), float(due.mean())
        if not (mean < self.share * wanted and mean + self.errors * float(had.std()) / np.sqrt(self.samples) < wanted):
            return
        self._told = True
        yield self.finding(
            snapshot.step,
            f"batches hold {mean / wanted:.0%} of the label entropy that shuffled ones would hold: classes come one after another",
            first_step=self._first,
            subjects=batch[0],
            evidence={"share": mean / wanted, "batch entropy": mean, "shuffled": wanted, "entropy": entropy},
            threshold=f"{self.share:.0%} in the mean of {self.samples} batches",
        )

    def missing(self) -> str:
        """How many batches could be compared."""
        if self._shuffled or self._told:
            return ""
        return "" if len(self._pairs) >= self.samples else f"{len(self._pairs)} of {self.samples} batches that can be compared"

    def state_dict(self) -> dict[str, Any]:
        """The last batches."""
        return {"pairs": [[*pair] for pair in self._pairs], "first": self._first, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._pairs = [[float(value) for value in pair] for pair in state["pairs"]]
        self._first, self._told = int(state["first"]), bool(state["told"])


def _largest_and_rest(top: float) -> float:
    """The entropy in nats of "the largest class or another one", which that of all classes is never below."""
    return float(-top * np.log(top) - (1 - top) * np.log1p(-top)) if 0 < top < 1 else 0.0

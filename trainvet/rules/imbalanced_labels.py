"""IN104: one class makes up nearly all labels and nothing corrects for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot


@dataclasses.dataclass
class ImbalancedLabels(Rule):
    """
    ## What it checks
    The share of the most frequent class among at least ``labels`` labels counted so far: above ``share`` by three standard errors a warning where
    neither class weights nor sample weights nor a sampler are in use. The most frequent class ``ratio`` times as frequent as the rarest: information.
    ## Why it matters
    A model that always answers with that class has a low loss and a high accuracy, and has learnt nothing.
    ## What to do
    Weight the classes, draw them evenly, and watch a metric that does not reward the frequent class (balanced accuracy, F1).
    ## Known limits
    Labels of sampled batches. Labels of every position of an image or sequence are mostly background by nature: information. Rare events may be
    what they are: mute it then.
    """

    code = "IN104"
    reads: ClassVar[frozenset[str]] = frozenset({"label.top_share", "label.rarest_share", "label.seen"})
    causes = ("the data are dominated by one class and nothing corrects for it",)
    fixes = ("weight the classes by one over their frequency", "draw the classes evenly, with a weighted sampler")

    share: float = 0.95
    ratio: float = 10.0
    labels: int = 500

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._told: dict[str, int] = {}
        self._seen = 0.0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Weights, samplers and the labels' shape."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """The counts so far."""
        column = snapshot.column("label.top_share")
        if column is None:
            return
        seen, rarest = snapshot.values("label.seen", column[0]), snapshot.values("label.rarest_share", column[0])
        for name, top, count, rare in zip(column[0], column[1].tolist(), seen.tolist(), rarest.tolist(), strict=True):
            self._seen = max(self._seen, count)
            if not (count >= self.labels and 0 <= top <= 1):
                continue
            loss, error = self._facts.loss_of_label(name), math.sqrt(top * (1 - top) / count)
            over = top - 3 * error > self.share and top < 1  # all of one class is another matter
            corrected = loss.weighted or self._facts.balanced
            level = Severity.WARNING if over and not corrected and not self._dense(name, loss) else Severity.INFO
            if not (over or (rare > 0 and top > self.ratio * rare)) or self._told.get(name, 0) >= level:
                continue
            self._told[name] = int(level)
            how = "; class weights or a sampler are in use" if corrected else ""
            yield self.finding(
                snapshot.step,
                f"one class has {top:.1%} of {int(count)} labels, the rarest {rare:.2%}{how}",
                first_step=0,
                subjects=(name,),
                severity=level,
                evidence={"top share": top, "rarest share": rare, "labels": int(count)},
                threshold=f"{self.share:.0%}; information above {self.ratio:g} to 1",
                fixes=(f"weight the classes, the frequent one by {(1 - top) / top:.2g} of the others" if over else self.fixes[0], self.fixes[1]),
            )

    def _dense(self, name: str, loss: Loss) -> bool:
        """Has a sample several labels (segmentation, tokens)?"""
        subject = self._facts.of("label").get(name)
        if subject is None or len(subject.shape) < 2 or not subject.shape[0]:
            return False
        return subject.numel // subject.shape[0] not in (1, loss.classes)

    def missing(self) -> str:
        """How many labels were counted."""
        return "" if self._seen >= self.labels else f"{int(self._seen)} of {self.labels} class labels"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": dict(self._told), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = {str(name): int(level) for name, level in state["told"].items()}
        self._seen = float(state["seen"])

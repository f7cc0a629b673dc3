"""IN108: most of a batch is padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class MostlyPadding(Rule):
    """
    ## What it checks
    The share of padding tokens in integer inputs, averaged over the first ``samples`` sampled batches, is above ``share``.
    ## Why it matters
    The time is spent on tokens that teach nothing, and a mean over all positions is mostly one over padding.
    ## What to do
    Sort or bucket the sequences by length, pad to the longest of the batch instead of a fixed length, or pack them.
    ## Known limits
    The padding index is the embedding's (`padding_idx`, `mask_zero`); inputs without one are not judged. SageMaker Debugger's 50 %.
    """

    code = "IN108"
    reads: ClassVar[frozenset[str]] = frozenset({"input.padding_share"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("sequences of very different length are padded to one fixed length",)
    fixes = ("pad to the longest sequence of each batch", "bucket the sequences by length")

    share: float = 0.5
    samples: int = 20

    def __post_init__(self) -> None:
        self._kept = PerSubject(total=0.0, count=0.0)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Average over batches; judged once per input."""
        column = snapshot.column("input.padding_share")
        if column is None:
            return
        rows = self._kept.rows(column[0])
        count = self._kept["count"][rows] + 1
        total = self._kept["total"][rows] + column[1]
        self._kept["count"][rows], self._kept["total"][rows] = count, total
        for index in ((count == self.samples) & (total / count > self.share)).nonzero()[0].tolist():
            mean = float(total[index] / count[index])
            yield self.finding(
                snapshot.step,
                f"{mean:.0%} of the tokens are padding",
                first_step=0,
                subjects=(column[0][index],),
                evidence={"padding share": mean, "batches": self.samples},
                threshold=f"{self.share:.0%} over {self.samples} batches",
            )

    def missing(self) -> str:
        """How many batches there were."""
        seen = int(self._kept["count"].max()) if self._kept.names else 0
        return "" if seen >= self.samples else f"{seen} of {self.samples} sampled batches"

    def state_dict(self) -> dict[str, Any]:
        """Sums per input."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state)

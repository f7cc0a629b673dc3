"""IN112: the data set is tiny for what is to be learnt from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts


@dataclasses.dataclass
class FewSamples(Rule):
    """
    ## What it checks
    An epoch has fewer than ``per_class`` samples per class, or fewer than ``batches`` batches.
    ## Why it matters
    A model can learn so few samples by heart, and a rate, schedule or metric that is set per epoch means little. Often the loader reads
    a part of the data only: one file of many, a debugging limit that stayed in.
    ## What to do
    Check how many samples the loader yields; for a small data set use pretrained weights, augmentation and cross-validation.
    ## Known limits
    INFO only. Silent where few batches are wanted (`overfit_batches`) and where the length of an epoch is not known.
    """

    code = "IN112"
    severity = Severity.INFO
    causes = ("the loader yields a part of the data only", "the data set is small")
    fixes = ("compare the number of samples with that of the data set", "use pretrained weights or augmentation, and watch the validation")

    per_class: int = 10
    batches: int = 10

    def __post_init__(self) -> None:
        self._known = False
        self._told = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge as soon as both the loader and the loss are known."""
        samples, batches = facts.samples_per_epoch, facts.batches_per_epoch
        classes = max((loss.classes for loss in facts.losses), default=0)
        self._known = samples is not None or batches is not None
        if self._told or facts.repeats_batches or not self._known:
            return
        few = samples is not None and classes > 1 and samples < self.per_class * classes
        short = batches is not None and batches < self.batches
        if not (few or short):
            return
        self._told = True
        what = f"an epoch has {samples} samples for {classes} classes" if few else f"an epoch has {batches} batches"
        yield self.finding(
            0,
            what,
            evidence={"samples": samples or 0, "batches": batches or 0, "classes": classes},
            threshold=f"{self.per_class} samples per class and {self.batches} batches",
        )

    def missing(self) -> str:
        """Whether the length of an epoch is known."""
        return "" if self._known else "the length of an epoch"

    def state_dict(self) -> dict[str, Any]:
        """Whether it was told."""
        return {"told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = bool(state["told"])

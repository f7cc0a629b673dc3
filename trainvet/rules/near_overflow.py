"""NF102: float16 values that climb towards the largest one there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import PerSubject, Rows, Rule
from trainvet.statistics import Facts, Snapshot, kind_of

LARGEST = 65504.0
TARGETS = ("activation", "gradient")


@dataclasses.dataclass
class NearOverflow(Rule):
    """
    ## What it checks
    The largest absolute value of a float16 activation, or of the unscaled gradient of a float16 parameter, above ``share`` of 65504 on ``patience``
    samples in a row, and larger at the end of these than at their beginning.
    ## Why it matters
    The next power of two is infinite: the loss becomes NaN, or the loss scaler skips every step.
    ## What to do
    Compute in bfloat16, take the operation out of autocast, or keep the values small: normalise, scale, clip.
    ## Known limits
    float32 and bfloat16 are not judged: they reach 3e38. Infinite values are (masks of -inf, or NF101's), and large values that stand still are
    masks; neither is told.
    """

    code = "NF102"
    reads: ClassVar[frozenset[str]] = frozenset({"activation.abs_max", "gradient.abs_max"})
    causes = (
        "activations or logits that grow without a normalisation",
        "an operation unfit for float16: exponential, square, sum over many elements",
    )
    fixes = ("compute in bfloat16", "put a normalisation layer in front of it, or run this module in float32")

    share: float = 0.5
    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = {target: Rows() for target in TARGETS}
        self._kept = {target: PerSubject(count=0.0, value=0.0, first=-1.0, told=0.0) for target in TARGETS}
        self._any = False
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which subjects are float16."""
        self._facts = facts
        for target, rows in self._rows.items():
            rows.choose(name for name, item in facts.of(kind_of(target)).items() if item.dtype == "float16")
        self._any = any(item.dtype == "float16" and item.kind in ("activation", "parameter") for item in facts.subjects)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count the samples above the limit, and see whether they rise."""
        fresh = False
        for target, rows in self._rows.items():
            column = snapshot.column(f"{target}.abs_max")
            if column is None or not rows.find(column[0]):
                continue
            fresh, names, top = True, rows.names, rows.values(snapshot, f"{target}.abs_max")
            high = np.isfinite(top) & (top > self.share * LARGEST)
            kept = self._kept[target]
            index = kept.rows(names)
            count = np.where(high, kept["count"][index] + 1, 0.0)
            value = np.where(count == 1, top, kept["value"][index])
            first = np.where(count == 1, snapshot.step, kept["first"][index])
            told = np.where(high, kept["told"][index], 0.0)
            due = np.flatnonzero((count >= self.patience) & (top > value) & (told == 0))
            told[due] = 1.0
            kept["count"][index], kept["value"][index], kept["first"][index], kept["told"][index] = count, value, first, told
            if len(due):
                yield self._tell(snapshot, target, [names[row] for row in due], float(top[due].max()), int(first[due].min()))
        self._samples += fresh

    def _tell(self, snapshot: Snapshot, target: str, names: list[str], top: float, since: int) -> Finding:
        places = self._facts.upstream_first(names)
        return self.finding(
            snapshot.step,
            f"the largest float16 {target} has risen to {top:.0f}, {top / LARGEST:.0%} of what float16 can hold ({places[0]})",
            first_step=since,
            subjects=places,
            evidence={"largest": top, "limit of float16": LARGEST, "places": len(places)},
            threshold=f"{self.share * LARGEST:.0f} on {self.patience} samples in a row, rising",
        )

    def missing(self) -> str:
        """Is there anything in float16?"""
        if not self._any:
            return "no float16 tensor was seen"
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"samples": self._samples, **{target: kept.state_dict() for target, kept in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for target, kept in self._kept.items():
            kept.load_state_dict(state[target])
        self._samples = int(state["samples"])

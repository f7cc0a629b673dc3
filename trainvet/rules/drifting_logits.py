"""AC107: the logits drift: their softmax normaliser grows and grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class DriftingLogits(Rule):
    """
    ## What it checks
    The mean absolute logarithm of the softmax normaliser of the predictions: its median over ``span`` steps above ``growth`` times that of the first
    such window and above ``level``, in ``patience`` windows in a row.
    ## Why it matters
    The loss does not see a shift of all logits, so that they may drift until float16 or bfloat16 cannot tell them apart.
    ## What to do
    Add the z-loss, 1e-4 times the square of this logarithm, or decay the output layer.
    ## Known limits
    Information only; the limits are provisional. A window needs at least 3 samples. Source of the z-loss: PaLM, Chowdhery et al. 2022.
    """

    code = "AC107"
    severity = Severity.INFO
    reads: ClassVar[frozenset[str]] = frozenset({"output.log_normalizer"})
    causes = ("nothing holds the sum of the logits: no z-loss, no weight decay on the output layer", "learning rate too high for the output layer")
    fixes = ("add the z-loss: loss + 1e-4 * logits.logsumexp(-1).square().mean()", "decay the output layer's weights")

    growth: float = 3.0
    level: float = 20.0
    span: int = 1000
    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._of: dict[str, dict[str, Any]] = {}
        self._windows = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Take over the plan."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Close a window with the first sample of the next one."""
        column = snapshot.column("output.log_normalizer")
        if column is None:
            return
        window = snapshot.step // max(self.span, 1)
        for name, value in zip(column[0], column[1].tolist(), strict=True):
            kept = self._of.setdefault(name, {"window": window, "values": [], "first": None, "streak": 0, "since": -1})
            if window > kept["window"]:
                yield from self._close(snapshot.step, name, kept)
                kept.update(window=window, values=[])
            if np.isfinite(value):
                kept["values"] = [*kept["values"], value][-self.span :]

    def _close(self, step: int, name: str, kept: dict[str, Any]) -> Iterable[Finding]:
        if len(kept["values"]) < 3:
            return
        self._windows += 1
        now = median(np.array(kept["values"]))
        if kept["first"] is None:
            kept["first"] = now
            return
        holds = now > self.growth * kept["first"] and now > self.level
        kept["since"] = (kept["since"] if kept["streak"] else kept["window"] * self.span) if holds else -1
        kept["streak"] = kept["streak"] + 1 if holds else 0
        if kept["streak"] == self.patience:
            yield self.finding(
                step,
                f"the logits drift: |log Z| has risen from {kept['first']:.3g} to {now:.3g} ({name})",
                first_step=kept["since"],
                subjects=[name],
                evidence={"log normaliser": now, "at first": kept["first"]},
                threshold=f"{self.growth:g} times the first window and above {self.level:g}, in {self.patience} windows of {self.span} steps",
            )

    def missing(self) -> str:
        """How many windows there were."""
        wanted = self.patience + 1
        return "" if self._windows >= wanted else f"{self._windows} of {wanted} windows of {self.span} steps"

    def state_dict(self) -> dict[str, Any]:
        """The running windows."""
        return {"of": {name: {**kept, "values": [*kept["values"]]} for name, kept in self._of.items()}, "windows": self._windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._of = {name: {**kept, "values": [*kept["values"]]} for name, kept in state["of"].items()}
        self._windows = int(state["windows"])

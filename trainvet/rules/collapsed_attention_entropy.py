"""AC106: attention looks at one entry only, with logits that grow without end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class CollapsedAttentionEntropy(Rule):
    """
    ## What it checks
    The mean entropy of a softmax's rows over the logarithm of the entries they may choose from: below ``entropy``, at most half of what it was
    within the last ``span`` steps, with logits above ``logit``, on ``patience`` samples in a row.
    ## Why it matters
    Attention that collapses passes no gradient to what it does not look at; such runs often diverge later.
    ## What to do
    Normalise queries and keys, lower the rate, or cap the logits.
    ## Known limits
    Information only: single heads, attention to a first token and hard attention are sharp in good health, and the limits are provisional. Source:
    Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.
    """

    code = "AC106"
    severity = Severity.INFO
    reads: ClassVar[frozenset[str]] = frozenset({"activation.entropy", "activation.input_abs_max"})
    causes = ("learning rate too high for the attention layers", "queries and keys that grow without normalisation")
    fixes = ("normalise queries and keys (QK normalisation)", "lower the learning rate or warm it up for longer")

    entropy: float = 0.1
    logit: float = 100.0
    span: int = 1000
    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._kept = PerSubject(old=np.nan, new=np.nan)
        self._streak = Streak(self.patience)
        self._half = self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which sites are a softmax that is not the prediction."""
        self._facts = facts
        self._rows.choose(name for name, item in facts.of("activation").items() if item.function == "softmax" and item.role not in ("output", "gate"))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Compare with the largest entropy of the last span, kept as the largest of its two halves."""
        column = snapshot.column("activation.entropy")
        if column is None or not self._rows.find(column[0]):
            return
        self._samples += 1
        names, entropy, logit = (
            self._rows.names,
            self._rows.values(snapshot, "activation.entropy"),
            self._rows.values(snapshot, "activation.input_abs_max"),
        )
        rows, kept = self._kept.rows(names), self._kept
        half = 2 * snapshot.step // max(self.span, 1)
        if half > self._half:
            kept["old"][:] = kept["new"] if half == self._half + 1 else np.nan
            kept["new"][:] = np.nan
            self._half = half
        kept["new"][rows] = np.fmax(kept["new"][rows], entropy)
        before = np.fmax(kept["old"][rows], kept["new"][rows])
        holds = (entropy < self.entropy) & (entropy <= before / 2) & (logit > self.logit)
        due = self._streak.update(names, holds, snapshot.step)
        if due:
            worst = min(due, key=lambda row: float(entropy[row]))
            yield self.finding(
                snapshot.step,
                f"attention entropy has fallen from {before[worst]:.2g} to {entropy[worst]:.2g} of its maximum, with logits up to {logit[worst]:.3g}"
                f" ({names[worst]})",
                first_step=min(self._streak.first(names[row]) for row in due),
                subjects=self._facts.upstream_first(names[row] for row in due),
                evidence={"entropy": float(entropy[worst]), "before": float(before[worst]), "largest logit": float(logit[worst]), "layers": len(due)},
                threshold=f"below {self.entropy:g} and halved, with logits above {self.logit:g}",
            )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples of a softmax"

    def state_dict(self) -> dict[str, Any]:
        """The largest entropies of the last span."""
        return {"kept": self._kept.state_dict(), "streak": self._streak.state_dict(), "half": self._half, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._streak.load_state_dict(state["streak"])
        self._half, self._samples = int(state["half"]), int(state["samples"])

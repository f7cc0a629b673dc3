"""WT110: one weight grows away from its own start while the others do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rule import PerSubject, Rows, Rule
from trainvet.statistics import Facts, Snapshot

FLOAT16 = 65504.0


@dataclasses.dataclass
class OutgrownWeight(Rule):
    """
    ## What it checks
    The RMS of a matrix above ``growth`` times its RMS on the first sample and larger on each of ``patience`` samples in a row, while the median
    matrix has stayed below ``siblings``. Or: an element of a float16 weight above half of 65504, on as many samples.
    ## Why it matters
    A weight that runs away makes logits and activations follow; softmax saturates, float16 overflows, and the loss blows up later.
    ## What to do
    Decay this weight, normalise what enters or leaves it, or give it a lower rate.
    ## Known limits
    Information only for embeddings, for the layer that makes the prediction (targets may be large) and in front of normalisation, where the scale has
    no effect. A matrix that starts at 0 is compared with its size when an update first is below ``settled`` of it. Not judged: starts below
    1e-3, and models with fewer than 3 matrices. Largest healthy growth measured: 7.5.
    """

    code = "WT110"
    reads: ClassVar[frozenset[str]] = frozenset({"weight.rms", "weight.abs_max", "update.ratio"})
    causes = ("nothing bounds the weight: no decay, no normalisation", "a learning rate too high for this layer", "attention logits that drift")
    fixes = ("give this weight a weight decay of 0.01", "normalise what enters it (for attention: queries and keys)", "give it a lower learning rate")

    growth: float = 20.0
    siblings: float = 5.0
    patience: int = 5
    floor: float = 1e-3
    settled: float = 0.25

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._mild: frozenset[str] = frozenset()
        self._narrow: frozenset[str] = frozenset()
        self._kept = PerSubject(start=np.nan, before=np.nan, count=0.0, high=0.0, first=-1.0, told=0.0)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices are judged, and for which of them the scale matters less."""
        self._facts = facts
        owned, parameters = facts.owned, facts.parameters
        behind = {name for layer in facts.layers if layer.kind in ("batch_norm", "norm") for name in layer.after}
        unknown = not facts.layers and any(item.role == "norm" for item in parameters.values())
        chosen = {name: item for name, item in parameters.items() if item.is_matrix and not item.tied_to and (not owned or name in owned)}
        heads = {loss.output_layer for loss in facts.losses if loss.output_layer}
        last = max(chosen.values(), key=lambda item: item.depth, default=None)
        heads |= {last.module} if last is not None and not heads else set()
        mild = (name for name, item in chosen.items() if unknown or item.role == "embedding" or item.module in behind or item.module in heads)
        self._mild = frozenset(mild)
        self._narrow = frozenset(name for name, item in chosen.items() if item.dtype == "float16")
        self._rows.choose(chosen)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Compare each matrix with its start and with the others."""
        column = snapshot.column("weight.rms")
        if column is None or not self._rows.find(column[0]):
            return
        self._samples += 1
        names, size, top = self._rows.names, self._rows.values(snapshot, "weight.rms"), self._rows.values(snapshot, "weight.abs_max")
        kept, rows = self._kept, self._kept.rows(self._rows.names)
        settled = ~(self._rows.values(snapshot, "update.ratio") > self.settled)  # a matrix that starts at 0 has its scale from the first updates
        start = np.where(np.isnan(kept["start"][rows]) & settled, size, kept["start"][rows])
        known = np.isfinite(size) & (start >= self.floor)
        growth = np.divide(size, start, out=np.zeros(len(size)), where=known)
        alone = known.sum() >= 3 and median(growth[known]) < self.siblings
        grows = known & (growth > self.growth) & (size > kept["before"][rows]) & bool(alone)
        near = self._rows.among(self._narrow) & np.isfinite(top) & (top > FLOAT16 / 2)
        count, high = np.where(grows, kept["count"][rows] + 1, 0.0), np.where(near, kept["high"][rows] + 1, 0.0)
        first = np.where(np.maximum(count, high) == 1, snapshot.step, kept["first"][rows])
        told = np.where(growth < self.growth / 2, 0.0, kept["told"][rows]) if not near.any() else kept["told"][rows].copy()
        due = ((count >= self.patience) | (high >= self.patience)) & (told == 0)
        kept["start"][rows], kept["before"][rows], kept["count"][rows], kept["high"][rows], kept["first"][rows] = start, size, count, high, first
        kept["told"][rows] = np.where(due, 1.0, told)
        mild = self._rows.among(self._mild) & ~near
        for severity in (Severity.WARNING, Severity.INFO) if due.any() else ():
            chosen = np.flatnonzero(due & (mild == (severity is Severity.INFO)))
            if len(chosen):
                worst = chosen[int(np.argmax(growth[chosen]))]
                limit = bool(near[worst])
                text = f"{names[worst]} holds {top[worst]:.0f}, half of what float16 can" if limit else ""
                yield self.finding(
                    snapshot.step,
                    text or f"{names[worst]} has grown to {growth[worst]:.3g} times its start and grows on; the median matrix has not",
                    first_step=int(first[chosen].min()),
                    subjects=self._facts.upstream_first(names[row] for row in chosen),
                    severity=severity,
                    evidence={"growth": float(growth[worst]), "largest": float(top[worst]), "weights": len(chosen)},
                    threshold=f"{FLOAT16 / 2:.0f}" if limit else f"{self.growth:g} times the start on {self.patience} growing samples",
                )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples > self.patience else f"{self._samples} of {self.patience + 1} samples"

    def state_dict(self) -> dict[str, Any]:
        """Where the weights started."""
        return {"kept": self._kept.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._samples = int(state["samples"])

"""WT109: the weights shrink towards zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot

WHOLE = "all matrices"


@dataclasses.dataclass
class CollapsingWeight(Rule):
    """
    ## What it checks
    The RMS of each matrix over its RMS on the first sample: the median over matrices below ``share`` on ``patience`` samples in a row. With fewer
    than 3 matrices all of them below ``few``, and a lone one only where an optimizer decays it.
    ## Why it matters
    Weight decay or a penalty outweighs the gradient: the model is driven to a constant, whatever the loss does, for the penalty is part of it.
    ## What to do
    Lower the decay, or the factor of the penalty.
    ## Known limits
    Not judged: weights in front of a normalisation layer (their scale has no effect), weights that are mostly 0 (pruning), that started below an RMS
    of 1e-3, or that no optimizer holds. Where there is normalisation and the order of the layers is not known, it is information. Smallest healthy
    median measured: 0.68.
    """

    code = "WT109"
    reads: ClassVar[frozenset[str]] = frozenset({"weight.rms", "weight.zero_share", "optimizer.learning_rate"})
    causes = ("weight decay too strong", "a penalty on the weights (L1, L2, kernel_regularizer) too strong")
    fixes = ("divide the weight decay by 100", "divide the factor of the penalty on the weights by 100")

    share: float = 0.3
    few: float = 0.1
    patience: int = 5
    floor: float = 1e-3
    zeros: float = 0.5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._rate = LearningRate()
        self._start = PerSubject(rms=np.nan)
        self._streak = Streak(self.patience)
        self._decayed: frozenset[str] = frozenset()
        self._mild = False
        self._samples, self._since = 0, -1

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices matter by their size, and which of them an optimizer decays."""
        self._facts = facts
        self._rate.begin(facts)
        behind = {name for layer in facts.layers if layer.kind in ("batch_norm", "norm") for name in layer.after}
        normalised = any(item.role == "norm" for item in facts.parameters.values())
        self._mild = normalised and not facts.layers
        owned = facts.owned
        self._rows.choose(
            name
            for name, item in facts.parameters.items()
            if item.is_matrix and not item.tied_to and (not owned or name in owned) and item.module not in behind
        )
        self._decayed = frozenset(name for item in facts.optimizers if item.weight_decay > 0 for name in (item.decayed or item.parameters))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Compare with the start."""
        self._rate.follow(snapshot)
        column = snapshot.column("weight.rms")
        if column is None or not self._rows.find(column[0]):
            return
        names, size, zeros = self._rows.names, self._rows.values(snapshot, "weight.rms"), self._rows.values(snapshot, "weight.zero_share")
        rows = self._start.rows(names)
        start = np.where(np.isnan(self._start["rms"][rows]), size, self._start["rms"][rows])
        self._start["rms"][rows] = start
        self._since = snapshot.step if self._since < 0 else self._since
        self._samples += 1
        known = np.isfinite(size) & (start >= self.floor) & ~(zeros > self.zeros)
        share = size[known] / start[known]
        count = len(share)
        if not count:
            return
        middle = median(share) if count >= 3 else float(share.max())
        limit = self.share if count >= 3 else self.few
        holds = middle < limit and (count > 1 or names[int(np.argmax(known))] in self._decayed)
        if not self._streak.update((WHOLE,), np.array([holds]), snapshot.step):
            return
        judged = [name for name, kept in zip(names, known, strict=True) if kept]
        small = [name for name, part in zip(judged, share, strict=True) if part < limit]
        decay = max((item.weight_decay for item in self._facts.optimizers if self._decayed.intersection(small) & set(item.parameters)), default=0.0)
        yield self.finding(
            snapshot.step,
            f"the weights have shrunk to {middle:.2g} of their start (median over {count} matrices) since step {self._since}",
            first_step=self._streak.first(WHOLE),
            subjects=self._facts.upstream_first(small),
            severity=Severity.INFO if self._mild else None,
            evidence={"share of the start": middle, "matrices": count, "weight decay": decay},
            threshold=f"{limit:g} on {self.patience} samples in a row",
            causes=self.causes if decay else self.causes[1:],
            fixes=(self._lighter(decay, small, snapshot.step), self.fixes[1]) if decay else self.fixes[1:],
        )

    def _lighter(self, decay: float, names: list[str], step: int) -> str:
        """A decay that takes a tenth of the weights over the run, but at most a hundredth of the present one."""
        rates = self._rate.of(names)
        rate = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
        gentle = 0.1 / (rate * max(self._facts.planned_steps or 0, step)) if rate > 0 else np.inf
        return f"set the weight decay to {min(gentle, decay / 100):.1g} (now {decay:g})"

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """Where the weights started."""
        kept = {"start": self._start.state_dict(), "streak": self._streak.state_dict(), "samples": self._samples, "since": self._since}
        return {**kept, "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._start.load_state_dict(state["start"])
        self._streak.load_state_dict(state["streak"])
        self._rate.load_state_dict(state["rate"])
        self._samples, self._since = int(state["samples"]), int(state["since"])

"""GR107: gradients are larger than Adam believes them to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UnderestimatedSecondMoment(Rule):
    """
    ## What it checks
    The root mean square of a parameter's gradient over Adam's second moment from before the step is at least ``ratio`` on ``patience`` samples in
    a row, after the first 1/(1-beta2) applied steps. Information.
    ## Why it matters
    The step is then as many times longer than meant. Spikes of the loss follow within 1 to 8 steps (Wortsman et al. 2023), mostly by way of the
    first layers.
    ## What to do
    Lower beta2, or clip the update (the gradient over its second moment) instead of the gradient.
    ## Known limits
    An early warning only. Rarely used rows (embeddings, experts) have such ratios in good health. Adam and its kin only.
    """

    code = "GR107"
    reads: ClassVar[frozenset[str]] = frozenset({"update.moment_ratio"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("beta2 too high for gradients that change quickly", "rare inputs whose gradients are large")
    fixes = ("lower beta2 to 0.95", "clip updates (AdaFactor's update clipping, StableAdamW)")

    ratio: float = 2.3
    patience: int = 2

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._beta, self._wait = 0.999, 1000
        self._high = Streak(self.patience)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which parameters Adam holds, and how long its memory is."""
        self._facts = facts
        adam = [item for item in facts.optimizers if item.family == "adam"]
        self._rows.choose(name for item in adam for name in item.parameters)
        self._beta = max((item.betas[1] for item in adam if len(item.betas) > 1 and 0 < item.betas[1] < 1), default=0.999)
        self._wait = math.ceil(round(1 / (1 - self._beta), 6))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count each parameter's samples above the ratio."""
        column = snapshot.column("update.moment_ratio")
        if column is None or snapshot.applied <= self._wait or not self._rows.find(column[0]):
            return
        self._samples += 1
        names, ratio = self._rows.names, self._rows.values(snapshot, "update.moment_ratio")
        due = self._high.update(names, np.isfinite(ratio) & (ratio >= self.ratio), snapshot.step)
        if due:
            worst = max(due, key=lambda place: float(ratio[place]))
            told = self._facts.upstream_first(names[place] for place in due)
            yield self.finding(
                snapshot.step,
                f"gradients are {ratio[worst]:.2g} times as large as Adam's second moment says ({names[worst]})",
                first_step=min(self._high.first(name) for name in told),
                subjects=told,
                evidence={"ratio": float(ratio[worst]), "parameters": len(due)},
                threshold=f"{self.ratio:g} on {self.patience} samples",
                fixes=(f"lower beta2 to 0.95 (now {self._beta:g})", self.fixes[1]) if self._beta > 0.95 else self.fixes[1:],
            )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples after step {self._wait}"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"high": self._high.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._high.load_state_dict(state["high"])
        self._samples = int(state["samples"])

"""AC103: a sigmoid or tanh layer works where its slope is almost 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector


@dataclasses.dataclass
class SaturatedActivation(Rule):
    """
    ## What it checks
    The share of a sigmoid or tanh layer's elements whose slope is below 5 % of its maximum (|x| above 4.36 or 2.18), on ``patience`` samples in a
    row: a warning above ``share``, an error above ``most``.
    ## Why it matters
    Almost no gradient passes such a layer, and what is in front of it stops learning.
    ## What to do
    Look at the scale of what enters the layer: inputs, initial weights, and the first updates.
    ## Known limits
    Gates (LSTM, squeeze-and-excitation, GLU) and output layers saturate in good health: INFO only. Measured: healthy tanh 0.11, saturated 0.92.
    """

    code = "AC103"
    reads: ClassVar[frozenset[str]] = frozenset({"activation.saturated_share"})
    causes = ("initial weights too large", "unnormalised inputs", "learning rate too high in the first steps")
    fixes = (
        "normalise the inputs, or what enters the layer",
        "initialise with Glorot (Xavier), gain 5/3 for tanh",
        "use ReLU or GELU in hidden layers, or a lower learning rate with a warm-up",
    )

    share: float = 0.5
    most: float = 0.9
    rearm: float = 0.4
    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._mild: frozenset[str] = frozenset()
        self._none = False
        self._kept = PerSubject(told=0.0)
        self._warn, self._error = Streak(self.patience), Streak(self.patience)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers are sigmoid or tanh, and which of them may saturate."""
        self._facts = facts
        layers = facts.of("activation")
        sites = {name: subject for name, subject in layers.items() if subject.function in ("sigmoid", "tanh")}
        self._none = bool(layers) and not sites
        self._rows.choose(sites)
        self._mild = frozenset(name for name, subject in sites.items() if subject.role in ("gate", "output"))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count each layer's saturated samples."""
        column = snapshot.column("activation.saturated_share")
        if column is None or not self._rows.find(column[0]):
            return
        self._samples += 1
        names, share = self._rows.names, self._rows.values(snapshot, "activation.saturated_share")
        calm = share < self.rearm
        level = np.zeros(len(names))
        level[self._warn.update(names, share > self.share, snapshot.step, clear=calm)] = Severity.WARNING
        level[self._error.update(names, share > self.most, snapshot.step, clear=calm)] = Severity.ERROR
        mild = np.array([name in self._mild for name in names])
        level = np.where(mild, np.minimum(level, Severity.INFO), level)
        rows = self._kept.rows(names)
        told = np.where(calm, 0, self._kept["told"][rows])
        self._kept["told"][rows] = np.maximum(told, level)
        for severity in (Severity.ERROR, Severity.WARNING, Severity.INFO):
            due = np.flatnonzero((level > told) & (level == severity))
            if len(due):
                yield self._tell(snapshot, severity, [names[index] for index in due], share[due])

    def _tell(self, snapshot: Snapshot, severity: Severity, names: list[str], share: Vector) -> Finding:
        worst = int(np.argmax(share))
        return self.finding(
            snapshot.step,
            f"{share[worst]:.0%} of the elements are where the slope is below 5 % of its maximum ({names[worst]})",
            first_step=min(self._warn.first(name) for name in names),
            subjects=self._facts.upstream_first(names),
            severity=severity,
            evidence={"saturated share": float(share[worst]), "layers": len(names)},
            threshold=f"{self.share:.0%}, error above {self.most:.0%}",
        )

    def missing(self) -> str:
        """How many samples there were."""
        if self._none:
            return "no sigmoid or tanh layer was seen"
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        kept = {"kept": self._kept.state_dict(), "samples": self._samples}
        return {**kept, "warn": self._warn.state_dict(), "error": self._error.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._warn.load_state_dict(state["warn"])
        self._error.load_state_dict(state["error"])
        self._samples = int(state["samples"])

"""MO108: a batch normalisation sees too few values per channel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rule, Streak
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class TinyNormalisationBatch(Rule):
    """
    ## What it checks
    How many values per channel (samples times positions) a batch normalisation in training mode works with. A single one on ``patience`` sampled
    steps in a row is an error, at most ``few`` information.
    ## Why it matters
    One value minus its own mean is 0: the layer puts out a constant and everything in front of it is cut off. With a few values, mean and variance
    are mostly noise.
    ## What to do
    A larger batch; layer or group normalisation, which do not look at the batch; `drop_last` for a last batch of one sample.
    ## Known limits
    Positions of an image or a sequence make up for samples and count. A single last batch of one sample is left alone. PyTorch itself refuses to
    normalise one value per channel.
    """

    code = "MO108"
    reads: ClassVar[frozenset[str]] = frozenset({"module.values", "module.samples"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("a batch size of 1 in front of a batch normalisation",)
    fixes = ("use a larger batch size, such as 32", "use layer or group normalisation instead")

    few: int = 4
    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._one, self._little = Streak(self.patience), Streak(self.patience)
        self._kept = PerSubject(seen=0.0)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """For the order of the layers."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count each layer's tiny batches in a row."""
        column = snapshot.column("module.values")
        if column is None:
            return
        names, values = column
        normal = values > 0  # 0: no batch normalisation, or not in training mode
        rows = self._kept.rows(names)
        self._kept["seen"][rows] += normal
        one = self._one.update(names, normal & (values <= 1), snapshot.step)
        little = self._little.update(names, normal & (values <= self.few), snapshot.step)
        samples = snapshot.values("module.samples", names)
        for due, streak, severity in ((one, self._one, Severity.ERROR), ([row for row in little if values[row] > 1], self._little, Severity.INFO)):
            if not due:
                continue
            told = [names[row] for row in due]
            least = int(np.min(values[due]))
            what = "one value per channel: what comes out is constant" if least <= 1 else f"{least} values per channel"
            yield self.finding(
                snapshot.step,
                f"{what} (a batch of {int(samples[due[0]]) if samples[due[0]] > 0 else least})",
                first_step=min(streak.first(name) for name in told),
                subjects=self._facts.upstream_first(told),
                severity=severity,
                evidence={"values": least, "layers": len(told)},
                threshold=f"one value, information up to {self.few}, on {self.patience} samples in a row",
            )

    def missing(self) -> str:
        """Whether a batch normalisation was seen."""
        return "" if self._kept.names and self._kept["seen"].max() >= self.patience else "no batch normalisation in training mode was seen"

    def state_dict(self) -> dict[str, Any]:
        """The streaks."""
        return {"one": self._one.state_dict(), "little": self._little.state_dict(), "kept": self._kept.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._one.load_state_dict(state["one"])
        self._little.load_state_dict(state["little"])
        self._kept.load_state_dict(state["kept"])

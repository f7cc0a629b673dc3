"""WT104: the first updates replace the weights instead of changing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import READS, Matrices, median
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class OversizedFirstUpdate(Rule):
    """
    ## What it checks
    The median over matrices of ‖update‖/‖weight‖ at each of the first ``steps`` applied steps: a warning above ``warn``, an error above ``error``.
    With fewer than 3 matrices the limits are ``few`` and five times it.
    ## Why it matters
    The initialisation is lost at once; units die, normalisation statistics jump, and the run often never recovers.
    ## What to do
    A healthy step is about 1e-3 of the weight. Lower the rate accordingly, or warm it up: Adam's first steps have full length whatever the gradient.
    ## Known limits
    Matrices with an RMS below 1e-3 at any of these steps (zero-initialised heads, gates, LoRA) do not count. Largest healthy median measured: 0.166.
    """

    code = "WT104"
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate"}
    causes = ("learning rate too high", "no warm-up", "unnormalised inputs make the gradients large", "weights initialised too small")
    fixes = ("lower the learning rate by the factor between the measured ratio and 1e-3", "warm the learning rate up", "normalise the inputs")

    warn: float = 0.2
    error: float = 1.0
    few: float = 1.0
    steps: int = 10
    floor: float = 1e-3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices = Matrices()
        self._rate = LearningRate()
        self._tiny: set[str] = set()
        self._told = 0
        self._judged = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices count."""
        self._facts = facts
        self._matrices.begin(facts)
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the early samples; a warning may be followed by one error."""
        self._rate.follow(snapshot)
        if not 1 <= snapshot.applied <= self.steps:
            return
        names, ratios, before = self._matrices.ratios(snapshot)
        self._tiny.update(name for name, size in zip(names, before, strict=True) if not size >= self.floor)
        keep = np.array([name not in self._tiny for name in names], dtype=bool)
        ratios = ratios[keep]
        names = tuple(name for name, kept in zip(names, keep, strict=True) if kept)
        if not names:
            return
        self._judged = True
        middle = median(ratios)
        warn, error = (self.warn, self.error) if len(names) >= 3 else (self.few, self.few * self.error / self.warn)
        severity = Severity.ERROR if middle > error else Severity.WARNING if middle > warn else 0
        if not severity > self._told:
            return
        self._told = severity
        over = self._facts.upstream_first(name for name, ratio in zip(names, ratios, strict=True) if ratio > warn)
        yield self.finding(
            snapshot.step,
            f"applied step {snapshot.applied}{self._rate.stated(names)} moved the weights by {middle:.2g} of their size"
            f" (median over {len(names)} matrices)",
            subjects=over,
            severity=Severity(severity),
            evidence={"update ratio": middle, "largest": float(ratios.max()), "matrices": len(names)},
            threshold=f"{warn:g}, error above {error:g}",
            fixes=(self._rate.advice(1e-3 / middle, names), self._rate.warm_up(), self.fixes[2]),
        )

    def missing(self) -> str:
        """The rule needs one early sample."""
        return "" if self._judged else f"a sample within the first {self.steps} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """What was told and which matrices were tiny."""
        return {"told": int(self._told), "judged": self._judged, "tiny": sorted(self._tiny), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._judged, self._tiny = int(state["told"]), bool(state["judged"]), set(state["tiny"])
        self._rate.load_state_dict(state["rate"])

"""LS101: steps are skipped for overflow more often than the scaler's own probing explains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class RepeatedOverflow(Rule):
    """
    ## What it checks
    Among the last ``window`` attempted steps so many were skipped that chance explains it with a probability below ``chance``: binomial, with an
    expected rate of 1/500 or 2/growth interval, whichever is larger. Calibration does not count: the first ``calibration`` steps, or until ``clean``
    steps in a row were applied.
    ## Why it matters
    Single skips are how a dynamic loss scale finds its size. Many mean that gradients keep leaving float16's range: updates are lost.
    ## What to do
    Lower the learning rate or clip the unscaled gradient; run the layer with the largest gradients in float32; use bfloat16.
    ## Known limits
    A scale that never settles is LS102. With a growth interval of 1 or 2 any number of skips is expected.
    """

    code = "LS101"
    reads: ClassVar[frozenset[str]] = frozenset({"run.skipped", "run.loss_scale"})
    severity: ClassVar[Severity] = Severity.WARNING
    causes = ("gradients spike: learning rate too high", "an operation that overflows float16 on some batches", "the loss is a sum, not a mean")
    fixes = ("clip the gradient norm, after unscaling", "use bfloat16, which needs no loss scale")

    window: int = 200
    chance: float = 1e-4
    calibration: int = 100
    clean: int = 20

    def __post_init__(self) -> None:
        self._rate = 1 / 500
        self._start, self._run, self._settled = -1, 0, False
        self._skips: list[int] = []
        self._told = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The scaler's growth interval sets what is to be expected."""
        if facts.growth_interval > 0:
            self._rate = min(1.0, max(1 / 500, 2 / facts.growth_interval))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Go through the attempted steps; once the scaler has settled only through those that were skipped."""
        scales = next(iter(snapshot.tracks("run.loss_scale").values()), None)
        track = next(iter(snapshot.tracks("run.skipped").values()), None)
        if track is None or scales is None:
            return
        if self._start < 0:
            self._start = int(track.steps[0])
        for step, skipped in zip(track.steps.tolist(), (track.values > 0).tolist(), strict=True):
            if not self._settled:
                self._run = 0 if skipped else self._run + 1
                self._settled = self._run >= self.clean or step - self._start + 1 >= self.calibration
            elif skipped:
                scale = scales.values[np.searchsorted(scales.steps, step, side="right") - 1]
                yield from self._judge(step, float(scale))

    def _judge(self, step: int, scale: float) -> Iterable[Finding]:
        before = [earlier for earlier in self._skips if earlier >= step - self.window]
        self._told = self._told and len(before) > 1 + self._rate * self.window
        self._skips = [earlier for earlier in before if earlier > step - self.window] + [step]
        tail = binomial_tail(len(self._skips), self.window, self._rate)
        if self._told or not tail < self.chance:
            return
        self._told = True
        tried = min(self.window, step - self._start + 1)
        yield self.finding(
            step,
            f"{len(self._skips)} of the last {tried} steps were skipped because gradients overflowed",
            first_step=self._skips[0],
            where="loss scale",
            evidence={"skipped": len(self._skips), "of": tried, "expected": self._rate * self.window, "chance": tail, "loss scale": scale},
            threshold=f"a chance of {self.chance:g}",
        )

    def missing(self) -> str:
        """Is the scaler still being calibrated?"""
        return "" if self._settled else f"{self._run} of {self.clean} steps applied in a row"

    def state_dict(self) -> dict[str, Any]:
        """Steps that were skipped, and where the scaler stands."""
        return {"start": self._start, "run": self._run, "settled": self._settled, "skips": list(self._skips), "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._start, self._run, self._settled = int(state["start"]), int(state["run"]), bool(state["settled"])
        self._skips, self._told = [int(step) for step in state["skips"]], bool(state["told"])


def binomial_tail(count: int, tried: int, rate: float) -> float:
    """The probability of ``count`` or more among ``tried``, each with probability ``rate``."""
    below = math.fsum(math.comb(tried, k) * rate**k * (1 - rate) ** (tried - k) for k in range(min(count, tried + 1)))
    return min(1.0, max(0.0, 1 - below))

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
    expected rate of 1/500 or 2/growth interval, whichever is larger. Calibration does not count: the first 5 % of a growth interval, or until 20
    steps in a row were applied.
    ## Why it matters
    Single skips are how a dynamic loss scale finds its size. Many mean that gradients keep leaving float16's range: updates are lost.
    ## What to do
    Lower the learning rate or clip the unscaled gradient; run the layer with the largest gradients in float32; use bfloat16.
    ## Known limits
    A scale that never settles is LS102.
    """

    code = "LS101"
    reads: ClassVar[frozenset[str]] = frozenset({"run.skipped", "run.loss_scale"})
    severity: ClassVar[Severity] = Severity.WARNING
    causes = ("gradients spike: learning rate too high", "an operation that overflows float16 on some batches", "the loss is a sum, not a mean")
    fixes = ("clip the gradient norm, after unscaling", "use bfloat16, which needs no loss scale")

    window: int = 200
    chance: float = 1e-4
    clean: int = 20

    def __post_init__(self) -> None:
        self._rate, self._calibration = 1 / 500, 100
        self._count, self._run, self._settled = 0, 0, -1
        self._skips: list[int] = []
        self._told = False
        self._scale = 0.0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The scaler's growth interval sets what is to be expected."""
        if facts.growth_interval > 0:
            self._rate, self._calibration = max(1 / 500, 2 / facts.growth_interval), max(1, facts.growth_interval // 20)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count attempted steps; the tail is computed only where a step was skipped."""
        scales = next(iter(snapshot.tracks("run.loss_scale").values()), None)
        track = next(iter(snapshot.tracks("run.skipped").values()), None)
        if track is None or scales is None:
            return
        flags = track.values > 0
        if not flags.any() and self._settled >= 0:
            self._count += len(flags)
            self._forget()
            return
        found = dict(zip(scales.steps.tolist(), scales.values.tolist(), strict=True))
        for step, skipped in zip(track.steps.tolist(), flags.tolist(), strict=True):
            self._scale = found.get(step, self._scale)
            self._count += 1
            self._run = 0 if skipped else self._run + 1
            if self._settled < 0 and (self._run >= self.clean or self._count >= self._calibration):
                self._settled = self._count
                continue
            if skipped and self._settled >= 0:
                yield from self._judge(step)
            else:
                self._forget()

    def _judge(self, step: int) -> Iterable[Finding]:
        self._skips.append(self._count)
        self._forget()
        tried = min(self.window, self._count - self._settled)
        tail = binomial_tail(len(self._skips), tried, self._rate)
        if tail >= self.chance or self._told:
            return
        self._told = True
        yield self.finding(
            step,
            f"{len(self._skips)} of the last {tried} steps were skipped because gradients overflowed",
            first_step=step - (self._skips[-1] - self._skips[0]),
            where="loss scale",
            evidence={"skipped": len(self._skips), "of": tried, "expected": self._rate * tried, "chance": tail, "loss scale": self._scale},
            threshold=f"a chance of {self.chance:g}",
        )

    def _forget(self) -> None:
        self._skips = [count for count in self._skips if count > self._count - self.window]
        if len(self._skips) <= 1 + self._rate * self.window:
            self._told = False

    def missing(self) -> str:
        """Is the scaler still being calibrated?"""
        return "" if self._settled >= 0 else f"the scaler has not settled in {self._count} steps"

    def state_dict(self) -> dict[str, Any]:
        """Counts of attempted steps."""
        counts = {"count": self._count, "run": self._run, "settled": self._settled, "skips": list(self._skips)}
        return {**counts, "told": self._told, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._count, self._run, self._settled = int(state["count"]), int(state["run"]), int(state["settled"])
        self._skips, self._told, self._scale = [int(count) for count in state["skips"]], bool(state["told"]), float(state["scale"])


def binomial_tail(count: int, tried: int, rate: float) -> float:
    """The probability of ``count`` or more among ``tried``, each with probability ``rate``."""
    if count <= 0:
        return 1.0
    below = [math.comb(tried, k) * rate**k * (1 - rate) ** (tried - k) for k in range(min(count, tried + 1))]
    return float(np.clip(1 - math.fsum(below), 0.0, 1.0))

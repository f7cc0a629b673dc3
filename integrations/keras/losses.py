"""The loss of each step from the running mean that Keras keeps in its logs.

Within an epoch the log after n batches holds M_n = (w_1*l_1 + ... + w_n*l_n) / (w_1 + ... + w_n), so a step's loss is a difference of two such
sums. That needs the weights: they are taken to be those of the last full batch, and checked against the metric's own count on each measured step
before a value is handed over. A difference of float32 sums loses precision with n: from where the rounding error could reach 2 % of the loss, the
rest of an epoch shows only the exact values of measured steps.
"""

from __future__ import annotations

import math

EPSILON = 2.0**-23
TOLERANCE = 0.02


class RunningMean:
    """The series of one loss. Steps come in blocks of one batch or, with ``steps_per_execution``, more; a block's value is its mean.

    Every method returns what may be handed over now: (step at which the block ended, value).
    """

    def __init__(self) -> None:
        self.weight: float | None = None
        self.typical = 0.0
        self._by_samples = False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Keras has reset the metric."""
        self.batches = 0
        self.count = 0.0
        self.mean = 0.0
        self.broken = self._coarse = False
        self._pending: list[tuple[int, float]] = []
        self._last: tuple[int, float, float] | None = None

    @property
    def waiting(self) -> bool:
        """Are there values that still have to be checked?"""
        return bool(self._pending)

    def first(self, step: int, mean: float, count: float, batches: int) -> list[tuple[int, float]]:
        """The first block of the run was not measured: its batches are taken to be of one size."""
        self.batches, self.count, self.mean, self.weight = batches, count, mean, count / batches
        self._note(mean)
        return [(step, mean)]

    def light(self, step: int, mean: float, batches: int) -> bool:
        """A block that ended at ``step`` was not measured; True when the mean has just become non-finite."""
        self.batches += batches
        if self.broken or self.weight is None:
            return False
        if not math.isfinite(mean):
            self.broken = True
            return True
        before = self.mean * self.count
        self.count += self.weight * batches
        self._last = (step, before, self.count - self.weight * batches)
        value = (mean * self.count - before) / (self.weight * batches)
        self._note(value)
        error = EPSILON * self.batches * max(abs(mean), abs(self.mean)) / batches
        self._coarse = self._coarse or error > TOLERANCE * self.typical
        if not self._coarse:
            self._pending.append((step, value))
        self.mean = mean
        return False

    def sampled(self, step: int, mean: float, count: float | None, samples: float, exact: float | None) -> list[tuple[int, float]]:
        """A measured batch of ``samples``: the metric's count after it, and the batch's own loss where it is known."""
        self.batches += 1
        before, ready, known = self.mean * self.count, [], self.count
        if count is not None:
            if self.weight is None and self.batches == 1:
                self.weight, self._by_samples = count, count == samples and samples != 1
            own = samples if self._by_samples else self.weight
            if own is not None and abs(self.count + own - count) < 0.5:
                ready = self._pending
            else:
                known = math.nan
            self.count = count
        self._pending, self._last = [], None
        value = exact
        if value is None and count is not None and not self.broken and math.isfinite(known):
            value = (mean * self.count - before) / (self.count - known) if math.isfinite(mean) else mean
        if value is not None:
            ready = [*ready, (step, value)]
            if math.isfinite(value):
                self._note(value)
        if math.isfinite(mean):
            self.mean = mean
        else:
            self.broken = True
        return ready

    def _note(self, value: float) -> None:
        self.typical = abs(value) if not self.typical else 0.9 * self.typical + 0.1 * abs(value)

    def verify(self, count: float | None, ahead: int, samples: float) -> list[tuple[int, float]]:
        """The metric's count after batch ``ahead`` (1, 2, …), one of ``samples``, of the block that is under way; the block itself is reported
        by :meth:`light`."""
        ready, self._pending = self._pending, []
        if count is None:
            return []
        if self.weight is None and self.batches == 0 and ahead == 1:
            self.weight, self._by_samples = count, count == samples and samples != 1
        if self.weight is None:
            return []
        own = samples if self._by_samples else self.weight
        return ready if abs(self.count + self.weight * (ahead - 1) + own - count) < 0.5 else []

    def close(self, count: float | None) -> list[tuple[int, float]]:
        """The epoch is over at the metric's ``count`` (None: unknown); its last batch may have been a smaller one."""
        ready, self._pending = self._pending, []
        if count is None or self.weight is None or not ready:
            return []
        short = self.count - count
        if abs(short) < 0.5:
            return ready
        if not 0 < short < self.weight or self._last is None:
            return []
        step, before, counted = self._last
        if ready[-1][0] == step:
            ready[-1] = (step, (self.mean * count - before) / (count - counted))
        return ready


class Instant(RunningMean):
    """A loss whose log is the batch's own value, as a training step written by the user may return it."""

    def first(self, step: int, mean: float, count: float, batches: int) -> list[tuple[int, float]]:
        """The first block of the run was not measured."""
        return [(step, mean)]

    def light(self, step: int, mean: float, batches: int) -> bool:
        """The log of a block is its last batch's loss."""
        self._pending.append((step, mean))
        return not math.isfinite(mean)

    def sampled(self, step: int, mean: float, count: float | None, samples: float, exact: float | None) -> list[tuple[int, float]]:
        """A measured batch."""
        ready, self._pending = self._pending, []
        return [*ready, (step, mean if exact is None else exact)]

    def verify(self, count: float | None, ahead: int, samples: float) -> list[tuple[int, float]]:
        """Nothing has to be checked."""
        ready, self._pending = self._pending, []
        return ready

    def close(self, count: float | None) -> list[tuple[int, float]]:
        """The epoch is over."""
        ready, self._pending = self._pending, []
        return ready

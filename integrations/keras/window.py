"""Which units of a ReLU layer were ever above zero: the running maximum per unit over a window of samples."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainvet.statistics import Vector

BATCHES, POSITIONS = 5, 1000


@dataclasses.dataclass
class Window:
    """The running maximum [units] of one layer, and what it was seen over."""

    high: Vector
    batches: int = 0
    positions: int = 0


class Windows:
    """One window per layer, kept on the host between samples. It closes after 5 batches and 1,000 positions; then the next begins.

    A position is one sample (dense layers), one pixel or one time step that is not masked.
    """

    def __init__(self) -> None:
        self._open: dict[str, Window] = {}

    def update(self, name: str, high: Vector, positions: int) -> tuple[float, int, int]:
        """Take a batch's maximum per unit; returns the share of units never above 0, the batches and the positions of the window so far."""
        window = self._open.get(name)
        closed = window is not None and window.batches >= BATCHES and window.positions >= POSITIONS
        if window is None or closed or window.high.shape != high.shape:
            window = self._open[name] = Window(np.full(high.shape, -np.inf))
        window.high = np.fmax(window.high, high)
        window.batches += 1
        window.positions += positions
        return float(np.mean(window.high <= 0)) if len(high) else 0.0, window.batches, window.positions

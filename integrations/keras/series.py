"""The every-step numbers between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainvet.statistics import Track


class Series:
    """Collects numbers by statistic and subject, and counts how many steps changed weights.

    ``accumulation`` is the number of batches that make one update; ``phase`` how many of them were already taken in when the series begins.
    """

    def __init__(self, applied: int = 0, accumulation: int = 1, phase: int = 0) -> None:
        self.applied = applied
        self.accumulation = accumulation
        self._taken = phase
        self._applied: dict[int, int] = {}
        self._cells: dict[str, dict[str, tuple[list[int], list[float]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def step(self, step: int, changed: bool = True) -> None:
        """One batch was trained on; ``changed``: its update was not skipped."""
        if changed:
            self._taken += 1
            if self._taken % self.accumulation == 0:
                self.applied += 1
        self._applied[step] = self.applied

    def add(self, key: str, name: str, step: int, value: float) -> None:
        """One number of one step."""
        steps, values = self._cells.setdefault(key, {}).setdefault(name, ([], []))
        steps.append(step)
        values.append(value)

    def flush(self) -> Mapping[str, Mapping[str, Track]]:
        """Everything since the last flush."""
        series = {
            key: {
                name: Track(
                    np.array(steps, dtype=np.int64),
                    np.array([self._applied.get(step, self.applied) for step in steps], dtype=np.int64),
                    np.array(values, dtype=np.float64),
                )
                for name, (steps, values) in cells.items()
            }
            for key, cells in self._cells.items()
        }
        self._cells, self._applied = {}, {}
        return series

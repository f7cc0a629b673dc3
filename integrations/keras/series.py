"""The every-step numbers between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainvet.statistics import Track

REMEMBERED = 1024


class Series:
    """Collects numbers by statistic and subject, and counts how many steps changed weights.

    ``accumulation`` is the number of batches that make one update; ``phase`` how many of them were already taken in when the series begins.
    """

    def __init__(self, applied: int = 0, accumulation: int = 1, phase: int = 0) -> None:
        self.applied = applied
        self.accumulation = accumulation
        self._taken = phase
        self._first = applied
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

    def applied_at(self, step: int) -> int:
        """How many steps up to ``step``, or up to the newest known one before it, changed weights."""
        if step in self._applied:
            return self._applied[step]
        known = [at for at in self._applied if at <= step]
        return self._applied[max(known)] if known else self._first

    def flush(self, step: int) -> Mapping[str, Mapping[str, Track]]:
        """Everything up to ``step`` since the last flush."""
        series: dict[str, dict[str, Track]] = {}
        later: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
        for key, cells in self._cells.items():
            for name, (steps, values) in cells.items():
                count = sum(at <= step for at in steps)
                if count:
                    applied = [self._applied.get(at, self._first) for at in steps[:count]]
                    series.setdefault(key, {})[name] = Track(np.array(steps[:count]), np.array(applied), np.array(values[:count], dtype=np.float64))
                if count < len(steps):
                    later.setdefault(key, {})[name] = (steps[count:], values[count:])
        self._cells = later
        if len(self._applied) > 2 * REMEMBERED:  # numbers of a step may come some steps late
            self._applied = {at: applied for at, applied in self._applied.items() if at > step - REMEMBERED}
        return series

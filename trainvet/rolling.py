"""The last rows of an every-step series, cut into windows that do not depend on how the rows arrive."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainvet.statistics import Snapshot, Steps, Track, Vector


class Rolling:
    """The last rows of one track, and the few numbers that a rule keeps beside them.

    After :meth:`add`, ``steps`` int64 [T] and ``values`` float64 [T] end with the rows just added and hold ``size`` rows before them
    (fewer at the start); ``count`` is the number of rows so far. ``kept`` holds plain numbers and lists.
    """

    def __init__(self, size: int, kept: Mapping[str, Any]) -> None:
        self.size = size
        self.steps: Steps = np.empty(0, dtype=np.int64)
        self.values: Vector = np.empty(0)
        self.count = 0
        self.applied = 0
        self.kept: dict[str, Any] = copy.deepcopy(dict(kept))

    def add(self, track: Track, skipped: bool = False) -> int:
        """Append rows and say how many; those of skipped steps and accumulation micro-steps only where ``skipped``."""
        steps, values, applied = track.steps, track.values, track.applied
        if not skipped and int(applied[-1]) - self.applied != len(applied):
            moved = applied > np.concatenate([[self.applied], applied[:-1]])
            steps, values = steps[moved], values[moved]
        self.steps = np.concatenate([self.steps[-self.size :], steps])
        self.values = np.concatenate([self.values[-self.size :], values])
        self.applied = int(applied[-1])
        self.count += len(steps)
        return len(steps)

    def windows(self, fresh: int, stride: int) -> range:
        """The ends, as positions in ``values``, of the windows of ``stride`` rows that the last ``fresh`` rows complete."""
        completed = self.count // stride - (self.count - fresh) // stride
        last = len(self.values) - self.count % stride
        return range(last - stride * (completed - 1), last + 1, stride)

    def total(self, end: int) -> int:
        """The number of rows up to the position ``end``, since the start."""
        return self.count - len(self.values) + end

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        rows = {"steps": self.steps[-self.size :].tolist(), "values": self.values[-self.size :].tolist()}
        return {**rows, "count": self.count, "applied": self.applied, "kept": copy.deepcopy(self.kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.steps, self.values = np.array(state["steps"], dtype=np.int64), np.array(state["values"], dtype=np.float64)
        self.count, self.applied, self.kept = int(state["count"]), int(state["applied"]), copy.deepcopy(dict(state["kept"]))


class Rollings:
    """A :class:`Rolling` for each subject of an every-step statistic; ``kept`` are the numbers each starts with."""

    def __init__(self, size: int, **kept: Any) -> None:
        self.size, self.kept = size, kept
        self._of: dict[str, Rolling] = {}

    def add(self, snapshot: Snapshot, key: str, skipped: bool = False) -> Iterator[tuple[str, Rolling, int]]:
        """Take over the snapshot's rows of ``key``: each subject's name, its rows so far, and how many of them are new (at least one)."""
        for name, track in snapshot.tracks(key).items():
            if name not in self._of:
                self._of[name] = Rolling(self.size, self.kept)
            rolling = self._of[name]
            fresh = rolling.add(track, skipped)
            if fresh:
                yield name, rolling, fresh

    @property
    def longest(self) -> int:
        """The number of rows of the longest series."""
        return max((rolling.count for rolling in self._of.values()), default=0)

    def all(self) -> list[Rolling]:
        """Every subject's rows."""
        return list(self._of.values())

    def items(self) -> list[tuple[str, Rolling]]:
        """Every subject's name and rows."""
        return list(self._of.items())

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists by subject."""
        return {name: rolling.state_dict() for name, rolling in self._of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._of = {name: Rolling(self.size, self.kept) for name in state}
        for name, rolling in self._of.items():
            rolling.load_state_dict(state[name])


def level(values: Vector, share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed; NaN sorts last. ``np.quantile`` takes forty times as long."""
    return float(np.sort(values)[max(0, math.ceil(share * len(values)) - 1)])

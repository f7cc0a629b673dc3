"""Layers whose units stay in the flat part of their activation: the windows over several batches that AC101 and AC102 judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainvet.finding import Severity
from trainvet.rule import PerSubject, Rows, Streak
from trainvet.statistics import Facts, Snapshot, Vector

READS = frozenset({"activation.dead_share", "activation.batches", "activation.positions", "activation.max"})


@dataclasses.dataclass(frozen=True)
class Limits:
    """A warning above ``share`` in ``positions`` if that is ``growth`` more than in the first such window; an error above ``most`` in ``enough``;
    told again below ``rearm``. A window lasts ``batches`` at least."""

    share: float
    growth: float
    most: float
    rearm: float
    batches: int
    positions: int
    enough: int


@dataclasses.dataclass(frozen=True)
class Dead:
    """Layers to be told together: their names, dead shares float64 [S], positions float64 [S] (0: whole samples at 0) and since when."""

    severity: Severity
    names: list[str]
    share: Vector
    positions: Vector
    since: int

    @property
    def worst(self) -> int:
        """The place of the layer with the largest share."""
        return int(np.argmax(self.share))

    def span(self, batches: int) -> str:
        """In how many positions of the worst layer, in words."""
        seen = self.positions[self.worst]
        return f"in {seen:.0f} positions of several batches" if seen else f"on {batches} samples in a row"


class DeadUnits:
    """The dead share of chosen layers over windows of several batches, and whether it is news.

    Units that are rare but alive look dead in few positions, hence wide windows and the comparison with the first one. A layer among ``broad``
    is also found where its largest output is 0 or less on ``batches`` samples in a row.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.windows = 0
        self.start = -1
        self._rows = Rows()
        self._broad: frozenset[str] = frozenset()
        self._kept = PerSubject(first=np.nan, since=np.nan, told=0.0)
        self._zero = Streak(limits.batches)

    def choose(self, names: Iterable[str], broad: Iterable[str] = ()) -> None:
        """The layers to be judged, and those of them that may be found by a largest output of 0."""
        self._rows.choose(names)
        self._broad = frozenset(broad)

    def judge(self, snapshot: Snapshot) -> Iterable[Dead]:
        """Judge the layers whose window is wide enough by now, and those that are 0 throughout; errors first."""
        column = snapshot.column("activation.dead_share")
        if column is None or not self._rows.find(column[0]):
            return
        names, limits = self._rows.names, self.limits
        self.start = snapshot.step if self.start < 0 else self.start
        dead, batches, positions, top = (self._rows.values(snapshot, f"activation.{key}") for key in ("dead_share", "batches", "positions", "max"))
        rows, kept = self._kept.rows(names), self._kept
        wide = (batches >= limits.batches) & (positions >= limits.positions)
        seen = (batches >= limits.batches) & (positions >= limits.enough)
        broad = self._rows.among(self._broad)
        alive = seen & (dead < limits.rearm) & ~(broad & (top <= 0))  # a window may be older than the death of its layer
        self.windows += bool(seen.any())
        first = np.where(wide & np.isnan(kept["first"][rows]), dead, kept["first"][rows])
        since = np.where((batches <= 1) | np.isnan(kept["since"][rows]), snapshot.step, kept["since"][rows])
        warn = wide & (dead > limits.share) & (dead - first >= limits.growth)
        level = np.where(seen & (dead > limits.most), Severity.ERROR, np.where(warn, Severity.WARNING, 0))
        zero = self._zero.update(names, broad & (top <= 0), snapshot.step, clear=alive)
        self.windows += bool(zero)
        level[zero], dead, positions = Severity.ERROR, dead.copy(), positions.copy()
        dead[zero], positions[zero] = 1.0, 0.0
        since[zero] = [self._zero.first(names[index]) for index in zero]
        told = np.where(alive, 0, kept["told"][rows])
        fresh = level > told
        kept["first"][rows], kept["since"][rows], kept["told"][rows] = first, since, np.maximum(told, level)
        for severity in (Severity.ERROR, Severity.WARNING):
            due = np.flatnonzero(fresh & (level == severity))
            if len(due):
                yield Dead(severity, [names[index] for index in due], dead[due], positions[due], int(since[due].min()))

    def missing(self) -> str:
        """Is any window wide enough to judge?"""
        return "" if self.windows else f"a window of {self.limits.batches} batches and {self.limits.enough} positions"

    def state_dict(self) -> dict[str, Any]:
        """The running windows and streaks."""
        return {"kept": self._kept.state_dict(), "zero": self._zero.state_dict(), "windows": self.windows, "start": self.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._zero.load_state_dict(state["zero"])
        self.windows, self.start = int(state["windows"]), int(state["start"])


def broad(facts: Facts, units: int) -> frozenset[str]:
    """Activations with at least ``units`` values per sample (or of unknown shape): a whole layer at 0 means something from several units on."""
    return frozenset(name for name, item in facts.of("activation").items() if not item.shape or item.numel >= units * item.shape[0])

"""Has a loss fallen since the start? Blocks of ten losses over all steps so far, and what they allow to be said."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from trainvet.matrices import median
from trainvet.statistics import Vector

ROWS, HALF = 10, 10


@dataclasses.dataclass(frozen=True)
class Halves:
    """The first and the last ten blocks compared.

    ``z`` is that of a one-sided Mann-Whitney test for the first being higher; ``begin`` and ``level`` are the medians of the outermost five
    blocks, ``now`` that of the last ten; ``drop`` is the difference of the means and ``error`` its standard error. ``scale`` is the first mean.
    """

    z: float
    begin: float
    level: float
    now: float
    drop: float
    error: float
    scale: float


@dataclasses.dataclass
class Course:
    """At most 40 blocks [mean, learning rate] of ``width`` times ten rows; when 40 are there, each two become one.

    ``due`` is set when 20 blocks are there for the first time and whenever they were merged: after 200, 400, 800, … rows.
    """

    peak: float = 0.0
    width: int = 1
    due: bool = False
    part: list[float] = dataclasses.field(default_factory=list)
    blocks: list[list[float]] = dataclasses.field(default_factory=list)

    def add(self, mean: float, rate: float, planned_peak: float = 0.0) -> None:
        """Take over the mean of ten rows and the learning rate at their end (NaN where it is not known).

        Blocks of a warm-up, with less than half of the highest rate, are dropped from the front.
        """
        self.peak = max(self.peak, planned_peak, rate)
        self.part.append(mean)
        if len(self.part) < self.width:
            return
        self.blocks.append([sum(self.part) / self.width, rate])
        self.part = []
        if self.blocks[0][1] < self.peak / 2:
            self.blocks = [block for block in self.blocks if not block[1] < self.peak / 2]
        if len(self.blocks) == 4 * HALF:
            self.blocks = [[(one[0] + two[0]) / 2, two[1]] for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self.width, self.due = self.width * 2, True
        elif len(self.blocks) == 2 * HALF and self.width == 1:
            self.due = True
        self.due = self.due and len(self.blocks) >= 2 * HALF

    @property
    def rows(self) -> int:
        """The rows that the blocks stand for."""
        return len(self.blocks) * self.width * ROWS

    def halves(self) -> Halves:
        """The comparison; needs 20 blocks."""
        means = np.array([block[0] for block in self.blocks])
        first, last = means[:HALF], means[-HALF:]
        higher = float((first[:, None] > last).sum() + (first[:, None] == last).sum() / 2)
        z = (higher - HALF * HALF / 2) / math.sqrt(HALF * HALF * (2 * HALF + 1) / 12)
        drop, scale = float(first.mean() - last.mean()), abs(float(first.mean()))
        return Halves(z, median(first[: HALF // 2]), median(last[HALF // 2 :]), median(last), drop, _error(first, last), scale)


def _error(first: Vector, last: Vector) -> float:
    """Standard error of the difference of two means of ten blocks, whose noise may be correlated from one block to the next."""
    apart = np.stack([first - first.mean(), last - last.mean()])
    square = float((apart**2).sum())
    if not square > 0:
        return 0.0
    follow = float((apart[:, 1:] * apart[:, :-1]).sum()) / square + 1 / HALF  # estimated from ten values it is too low by about a tenth
    follow = min(max(follow, 0.0), 0.9)
    return math.sqrt(square / (2 * HALF - 2) * 2 / HALF * (1 + follow) / (1 - follow))

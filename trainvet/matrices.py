"""The relative updates of the matrices for which the ratio says something."""

from __future__ import annotations

import numpy as np

from trainvet.rule import Rows
from trainvet.statistics import Facts, Snapshot, Vector

READS = frozenset({"update.ratio", "update.rms", "weight.rms"})


class Matrices:
    """Trainable tensors with at least two dimensions that an optimizer holds.

    A ratio is meaningful where the weights were not tiny before the update: a zero-initialised matrix (residual gate, LoRA's B, output
    head) moves by any multiple of itself. ``trainable`` and ``frozen`` count the matrices of the plan.
    """

    def __init__(self) -> None:
        self.rows = Rows()
        self.trainable = self.frozen = 0

    def begin(self, facts: Facts) -> None:
        """Read the plan. Parameters without an optimizer do not move, whatever their gradient (copies, target networks)."""
        matrices = {name: subject for name, subject in facts.parameters.items() if len(subject.shape) >= 2}
        owned = facts.owned
        chosen = [name for name, subject in matrices.items() if subject.trainable and (not owned or name in owned)]
        self.rows.choose(chosen)
        self.trainable = len(chosen)
        self.frozen = sum(not subject.trainable for subject in matrices.values())

    def ratios(self, snapshot: Snapshot) -> tuple[tuple[str, ...], Vector, Vector]:
        """Names [S], ‖update‖/‖weight before‖ float64 [S] and RMS of the weight before float64 [S]; empty where it was not measured.

        The weight before is update.rms / update.ratio; where the update is 0 it is the weight itself. A ratio that is not finite
        stands for a weight that was exactly 0: its RMS is 0.
        """
        column = snapshot.column("update.ratio")
        if column is None or not self.rows.find(column[0]):
            return (), np.empty(0), np.empty(0)
        ratio, moved, after = (self.rows.values(snapshot, key) for key in ("update.ratio", "update.rms", "weight.rms"))
        with np.errstate(divide="ignore", invalid="ignore"):
            before = np.where(ratio > 0, moved / ratio, np.where(np.isnan(after), np.inf, after))
        known = np.isfinite(ratio) & np.isfinite(moved)
        return self.rows.names, np.where(known, ratio, 0.0), np.where(known, before, 0.0)


def median(values: Vector) -> float:
    """The median of a non-empty finite vector; on short ones a tenth of the time that np.median takes."""
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else float(ordered[half - 1] + ordered[half]) / 2

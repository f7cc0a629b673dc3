"""How well a trained setup does on held-out data, and whether a fault has done measurable harm."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.detection.setup import Array, Setup

LOSS = 0.1  # of the healthy twin's score; a smaller difference is within what a seed does


def performance(setup: Setup, outputs: Array) -> float:
    """1 is perfect, 0 is what chance or the mean would reach (the setup's own measure for "other"); NaN where outputs are not finite."""
    if not np.isfinite(outputs).all():
        return math.nan
    if setup.score is not None:
        return setup.score(outputs, setup)
    truth = setup.val_y
    if setup.kind in ("classes", "tokens"):
        return above_chance(float((outputs.argmax(-1) == truth).mean()), truth)
    if setup.kind == "binary":
        return above_chance(float(((outputs > middle(setup)).reshape(-1) == (truth.reshape(-1) > 0)).mean()), truth)
    return float(1 - np.square(outputs.reshape(truth.shape) - truth).mean() / np.square(truth - truth.mean(0)).mean())


def above_chance(accuracy: float, truth: Array) -> float:
    """Accuracy, with the share of the most frequent class as 0."""
    _, counts = np.unique(truth, return_counts=True)
    chance = float(counts.max() / counts.sum())
    return (accuracy - chance) / (1 - chance)


def middle(setup: Setup) -> float:
    """Where "yes" begins: 0 for logits, 0.5 for probabilities."""
    return 0.5 if getattr(setup.criterion, "__module__", "").startswith("keras") and not getattr(setup.criterion, "from_logits", False) else 0.0


def harmed(score: float, healthy: float) -> bool:
    """Is a score clearly worse than the healthy twin's? A broken run has none (NaN)."""
    return not score >= healthy - max(LOSS * abs(healthy), 0.02)

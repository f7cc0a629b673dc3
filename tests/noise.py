"""Losses as healthy runs make them: a smooth course with noise of several kinds, all from a seed."""

from __future__ import annotations

import numpy as np

KINDS = ("gaussian", "log-normal", "t3", "ar", "bimodal", "near-zero")
SEEDS = range(8)


def noise(kind: str, length: int, seed: int) -> np.ndarray:
    """float64 [length] of about unit scale. "ar" is correlated over steps (0.95), "near-zero" mostly tiny with rare large values."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    normal = random.normal(size=length)
    if kind == "log-normal":
        return (np.exp(normal) - np.exp(0.5)) / 2.16
    if kind == "t3":
        return random.standard_t(3, size=length) / 3**0.5
    if kind == "ar":
        for row in range(1, length):
            normal[row] = 0.95 * normal[row - 1] + (1 - 0.95**2) ** 0.5 * normal[row]
        return normal
    if kind == "bimodal":
        return np.where(random.random(length) < 0.5, -1.0, 1.0) + 0.1 * normal
    return np.abs(normal) ** 3 / 4 if kind == "near-zero" else normal


def falling(kind: str, length: int, seed: int, size: float = 0.15, start: float = 2.3, end: float = 0.2, pace: float = 0.3) -> np.ndarray:
    """A loss that falls from ``start`` to ``end`` over a time of ``pace`` runs, with noise in proportion to its level."""
    course = end + (start - end) * np.exp(-np.arange(length) / (pace * length))
    return course * (1 + size * noise(kind, length, seed))

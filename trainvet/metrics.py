"""Metrics that a trainer reports once per epoch or evaluation: which way is better, which data they come from, and their course."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainvet.matrices import median
from trainvet.statistics import Snapshot

LAST = 64
DOWN = frozenset({"loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "bce", "crossentropy", "bpc", "wer", "cer"})
UP = frozenset({"acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "iou", "miou", "dice", "map", "bleu", "r2", "top1", "top5"})
HELD_OUT = frozenset({"val", "valid", "validation", "eval", "dev"})
TRAINED = frozenset({"train", "training", "epoch", "step"})


def words(name: str) -> list[str]:
    """ "val/Accuracy_epoch" -> ["val", "accuracy", "epoch"]."""
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


@functools.lru_cache(1024)
def direction(name: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where the name does not say (or says both)."""
    found = set(words(name))
    return bool(found & UP) - bool(found & DOWN)


@functools.lru_cache(1024)
def held_out(name: str) -> bool:
    """Is it measured on validation data?"""
    return bool(HELD_OUT & set(words(name)))


def quantity(name: str) -> tuple[str, ...]:
    """What is measured, whatever the data: "val_acc", "train/accuracy" and "accuracy" agree."""
    return tuple("accuracy" if word == "acc" else word for word in words(name) if word not in HELD_OUT | TRAINED)


@dataclasses.dataclass
class Course:
    """One metric: how many values there were, the first, the best so far, and the last ones. Values that are not finite are never best."""

    count: int = 0
    first: float = math.nan
    best: float = math.nan
    best_count: int = 0
    best_step: int = -1
    steps: list[int] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)

    def add(self, step: int, value: float, sign: int) -> None:
        """The next value; ``sign`` as in :func:`direction`."""
        self.count += 1
        self.first = value if self.count == 1 else self.first
        if math.isfinite(value) and not sign * value <= sign * self.best:
            self.best, self.best_count, self.best_step = value, self.count, step
        self.steps, self.values = [*self.steps[1 - LAST :], step], [*self.values[1 - LAST :], value]

    @property
    def age(self) -> int:
        """How many values ago the best one was."""
        return self.count - self.best_count

    @property
    def noise(self) -> float:
        """The standard deviation of one value around a smooth course, from second differences; 0 for fewer than 5 values."""
        if len(self.values) < 5:
            return 0.0
        bends = np.diff(np.array(self.values), 2)
        return 1.4826 * median(np.abs(bends - median(bends))) / math.sqrt(6) if np.isfinite(bends).all() else math.nan


class Metrics:
    """The course of each metric whose name says which way is better."""

    def __init__(self) -> None:
        self.of: dict[str, Course] = {}

    def add(self, snapshot: Snapshot) -> Iterator[list[str]]:
        """Take over the snapshot's values step by step; after each step, the names of the metrics that have a new value."""
        tracks = {name: track for name, track in snapshot.tracks("metric.value").items() if direction(name)}
        for step in sorted({int(step) for track in tracks.values() for step in track.steps}):
            fresh = []
            for name, track in tracks.items():
                for value in track.values[track.steps == step].tolist():
                    self.of.setdefault(name, Course()).add(step, value, direction(name))
                    fresh.append(name)
            yield fresh

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers by metric."""
        return {name: dataclasses.asdict(course) for name, course in self.of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.of = {name: Course(**course) for name, course in state.items()}

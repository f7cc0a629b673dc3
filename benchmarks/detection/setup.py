"""A training as a user would set it up, in plain fields, so that a fault can be put into it and taken out again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclasses.dataclass
class Setup:
    """Everything a run needs. ``x`` are the model's inputs, ``y`` its targets; ``val_x`` and ``val_y`` are never trained on.

    ``kind`` is what the targets are: "classes" and "tokens" (int64), "binary" (0 or 1), "values" (float targets), "images" (the input is the
    target) or "other", which brings its own ``score``. Scores are accuracies, or 1 - error / variance for what is continuous: higher is better.
    ``mark`` (a pattern of names) and ``start`` (a step) say where and when a fault was put in.
    """

    model: Any
    criterion: Any
    x: tuple[Array, ...]
    y: Array
    val_x: tuple[Array, ...]
    val_y: Array
    kind: str = "classes"
    classes: int = 0
    optimizer: str = "adam"
    rate: float = 1e-3
    momentum: float = 0.0
    decay: float = 0.0
    epsilon: float = 0.0
    batch: int = 32
    epochs: int = 5
    shuffle: bool = True
    schedule: Callable[..., Any] | None = None
    interval: str = "step"
    clip: float = 0.0
    precision: str = "32"
    accumulate: int = 1
    clears: bool = True
    mode: str = "train"
    trains: Callable[[str], bool] = lambda name: True
    forward: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    players: Sequence[tuple[str, Callable[..., Any]]] = ()
    score: Callable[..., float] | None = None
    jump: tuple[int, float] | None = None
    learnt: float = 0.3
    own: bool = True
    mark: str = ""
    start: int = 0

    @property
    def batches(self) -> int:
        """Batches per epoch; the last, smaller one counts."""
        return -(-len(self.y) // self.batch)

    @property
    def steps(self) -> int:
        """Planned optimizer steps."""
        return self.epochs * -(-self.batches // self.accumulate)

    @property
    def floating(self) -> bool:
        """Are the inputs measurements, as opposed to indices?"""
        return bool(np.issubdtype(self.x[0].dtype, np.floating))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A healthy training: ``build(seed)`` makes its :class:`Setup`. ``origin`` names the package whose model it trains."""

    name: str
    build: Callable[[int], Setup]
    frameworks: tuple[str, ...]
    origin: str = "own"


class Book(dict[str, Recipe]):
    """Recipes by name; :meth:`add` is a decorator for the functions that build them."""

    def __init__(self, *frameworks: str) -> None:
        super().__init__()
        self.frameworks = frameworks

    def add(self, origin: str = "own", only: tuple[str, ...] = ()) -> Callable[[Callable[[int], Setup]], Callable[[int], Setup]]:
        """Take a function up as a recipe under its own name."""

        def enter(build: Callable[[int], Setup]) -> Callable[[int], Setup]:
            name = build.__name__.replace("_", "-")
            self[name] = Recipe(name, build, only or self.frameworks, origin)
            return build

        return enter

"""What the probe needs from the backend that Keras runs on. TensorFlow is implemented; JAX and PyTorch are announced as not measured yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import keras

from trainvet.integrations.keras.facts import Traits
from trainvet.integrations.keras.layout import Layout
from trainvet.integrations.keras.plan import Plan
from trainvet.statistics import Vector


class UnmeasurableError(Exception):
    """A step that cannot be measured without changing the training, or at all; the text says why. Raised before anything has run."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """One layer of a replayed forward: were its input, its weights and its output free of NaN and +Inf (-Inf is what masks are made of), and the
    range of a clean input (NaN: no input)."""

    name: str
    kind: str
    clean_input: bool
    clean_weights: bool
    clean_output: bool
    low: float
    high: float


@dataclasses.dataclass
class Outcome:
    """What a measured step left behind beside its logs.

    ``vector`` is the packed reading (float64 [layout.size]). ``held`` says that the guard kept the update back. ``before`` maps variables' ids
    to their values before the step, on the device, where they were kept for a replay; ``outputs`` holds the predictions by name, of a large one the
    first samples.
    """

    layout: Layout
    vector: Vector
    held: bool = False
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Step(Protocol):
    """A compiled training step of ours."""

    traits: Traits
    errors: list[str]

    def prepare(self, iterator: Any) -> None:
        """Trace it for the iterator's batches. Raises UnmeasurableError; nothing has run then."""

    def __call__(self, batch: Any) -> tuple[dict[str, Any], Outcome]:
        """Train on one batch: the logs for Keras, and the outcome."""


class Backend(Protocol):
    """One of Keras' backends."""

    name: str

    def refusal(self, model: Any) -> str:
        """Why nothing can be observed here; empty where it can."""

    def measured(self, plan: Plan, optimizers: Mapping[str, Any], want: frozenset[str], guard: bool, keep: bool) -> Step:
        """A training step that measures ``want`` (nothing for an empty set) and, with ``guard``, holds an update that is not finite.
        ``keep`` has it keep the weights from before the step."""

    def single(self, function: Any, iterator: Any) -> Any:
        """The user's own compiled train function as a function of one batch."""

    def replay(self, plan: Plan, batch: Any, values: Mapping[str, Any]) -> list[Ran]:
        """One eager forward with the given values in the variables' places; nothing of the model changes. A record per layer, in order."""


class Unsupported:
    """A backend on which nothing is measured yet."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refusal(self, model: Any) -> str:
        """Always a reason."""
        return f"not supported yet with backend {self.name}: nothing is observed"


def choose() -> Backend:
    """The backend that Keras runs on."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from trainvet.integrations.keras.tensorflow import TensorFlow

        return TensorFlow()
    return Unsupported(name)  # type: ignore[return-value]

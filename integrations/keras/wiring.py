"""The layers of one traced step on TensorFlow: how often each was called and in which mode, whose output each is given, what made the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainvet.integrations.keras.facts import Origin
from trainvet.integrations.keras.plan import Place, Plan, function_of
from trainvet.integrations.keras.structure import LINEAR, TRANSPARENT, mode_of

# operations that change the form and not one element
RESHAPING = frozenset({"Reshape", "Transpose", "Squeeze", "ExpandDims", "Cast", "Identity"})
# what an operation says of the function that made a tensor, where no layer of Keras does
OPERATIONS = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "Relu6": "relu6", "Softplus": "softplus",
    "Elu": "elu", "Selu": "selu", "MatMul": "linear", "BiasAdd": "linear",
}  # fmt: skip
DEEP = 16


class Wiring:
    """Watches the calls of the leaf layers while a step is traced. It holds tensors of that graph, so it must not outlive the trace.

    ``called`` counts calls, those in branches too; ``training`` is 1 or 0 as each layer was last called (a frozen batch normalisation runs as in
    evaluation), absent where it does not show.
    """

    def __init__(self, plan: Plan) -> None:
        self.called = {place.name: 0 for place in plan.places if place.leaf and place.name and type(place.layer).__name__ != "InputLayer"}
        self.training: dict[str, float] = {}
        self.after: dict[str, tuple[str, ...]] = {}
        self._made: dict[Any, tuple[Place, Any, Any]] = {}
        self._unknown: set[str] = set()

    def call(self, place: Place, kwargs: Mapping[str, Any]) -> None:
        """A leaf layer is about to be called."""
        if place.name in self.called:
            self.called[place.name] += 1
        mode = mode_of(place.layer, kwargs)
        if mode is not None:
            self.training[place.name] = float(mode)

    def made(self, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """It has returned, in the graph of the step."""
        given = [leaf for leaf in tf.nest.flatten((args, dict(kwargs))) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
        makers = [self._maker(tensor) for tensor in given]
        if any(maker is None for maker in makers) or not makers:
            self._unknown.add(place.name)
        known = self.after.get(place.name, ())
        self.after[place.name] = tuple(dict.fromkeys((*known, *(maker.name for maker in makers if maker is not None))))
        if type(place.layer).__name__ not in TRANSPARENT:
            for leaf in tf.nest.flatten(output):
                if isinstance(leaf, tf.Tensor):
                    self._made[_key(leaf)] = place, leaf, given[0] if given else None

    def given(self) -> dict[str, tuple[str, ...]]:
        """Whose output each layer is given; () where something else lies between or it is not known."""
        return {name: () if name in self._unknown else makers for name, makers in self.after.items()}

    def origin(self, tensor: Any) -> Origin:
        """What made a prediction [batch, …]."""
        if not isinstance(tensor, tf.Tensor):
            return Origin()
        made, at = None, tensor
        for _ in range(DEEP):
            made = self._made.get(_key(at))
            if made is None:
                before = _before(at)
                if before is None:
                    break
                at = before
            elif _passes(made[0].layer) and made[2] is not None and (before := made[2]) is not at:
                at = before
            else:
                break
        if made is None:
            function = "" if tf.executing_eagerly() else OPERATIONS.get(at.op.type, "")
            return Origin("", function, -1)
        layer, rank = made[0].layer, at.shape.rank
        function = function_of(layer) or ("linear" if type(layer).__name__ in LINEAR else "")
        axis = getattr(layer, "axis", -1) if type(layer).__name__ == "Softmax" else -1
        counted = axis % rank if function == "softmax" and rank and isinstance(axis, int) else -1
        return Origin(made[0].name, function, counted)

    @staticmethod
    def key(tensor: Any) -> Any:
        """Equal for the same tensor of one trace."""
        return _key(tensor)

    @staticmethod
    def source(tensor: Any) -> Any:
        """The key of what a tensor is made of by nothing but reshaping and casts."""
        for _ in range(DEEP):
            before = _before(tensor)
            if before is None:
                break
            tensor = before
        return _key(tensor)

    def _maker(self, tensor: Any) -> Place | None:
        at = tensor
        for _ in range(DEEP):
            made = self._made.get(_key(at))
            if made is not None:
                return made[0]
            before = _before(at)
            if before is None:
                return None
            at = before
        return None


def _passes(layer: Any) -> bool:
    """Does the layer hand on what it is given? (An Activation("linear") does: mixed precision ends with one.)"""
    kind = type(layer).__name__
    return kind in TRANSPARENT or (kind == "Activation" and not function_of(layer))


def _before(tensor: Any) -> Any:
    """What a tensor was made of by nothing but reshaping; None otherwise."""
    if tf.executing_eagerly() or tensor.op.type not in RESHAPING or not tensor.op.inputs:
        return None
    return tensor.op.inputs[0]


def _key(tensor: Any) -> Any:
    return id(tensor) if tf.executing_eagerly() else (id(tensor.graph), tensor.name)

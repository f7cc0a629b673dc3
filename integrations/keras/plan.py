"""What there is to measure in a Keras model: layers by name, parameters with their roles, buffers, activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from trainvet.statistics import Subject

FLOATS = ("float16", "bfloat16", "float32", "float64")
# layers that only move, drop or join numbers: what they show was already shown by the layer before them
PASSIVE = (
    "InputLayer", "Flatten", "Reshape", "Permute", "RepeatVector", "Concatenate", "Identity", "Masking", "ActivityRegularization", "Dropout",
    "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D", "Cropping1D", "Cropping2D",
    "Cropping3D", "UpSampling1D", "UpSampling2D", "UpSampling3D", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D",
)  # fmt: skip
RELU = ("relu", "relu6")
NAMES = {"relu6": "relu", "swish": "silu", "linear": "", "static_softmax": "softmax"}
# layers whose output is the value of their activation function
SHOWN = ("Dense", "EinsumDense", "Activation", "SimpleRNN")
LAYERS = {
    "ReLU": "relu", "LeakyReLU": "leaky_relu", "PReLU": "prelu", "ELU": "elu", "Softmax": "softmax", "SELU": "selu", "GELU": "gelu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A layer and its dotted name below the model ("" for the model itself). A leaf is measured as one: cells of an RNN are not."""

    name: str
    layer: Any
    leaf: bool

    @property
    def measured(self) -> bool:
        """Does its output tell something that the layer before it did not?"""
        return self.leaf and bool(self.name) and type(self.layer).__name__ not in PASSIVE


class Plan:
    """Names and order of everything in ``model``; cheap, rebuilt when the model was built or its layers were frozen or unfrozen.

    ``owned`` maps an optimizer's name to the names of the parameters it was seen to update; before the first step the trainable ones
    are taken for the model's optimizer. ``depth`` is the place of a layer in the traced forward, once it is known.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.places = list(_walk(model))
        self.depth = {place.name: index for index, place in enumerate(self.places)}
        self.by_layer = {id(place.layer): place for place in self.places}
        self.names: dict[int, str] = {}
        self.home: dict[int, Place] = {}
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self.outputs = frozenset(_output_layers(model))
        weights: set[int] = set()
        for place in self.places:
            own = getattr(place.layer, "_trainable_variables", ())
            weights |= {id(variable) for variable in own}
            for variable in [*own, *getattr(place.layer, "_non_trainable_variables", ())]:
                self.home.setdefault(id(variable), place)
        for variable in model.variables if model.built or model.weights else ():
            if id(variable) in self.names or str(variable.dtype) not in FLOATS:
                continue
            home = self.home.get(id(variable))
            if home is None and not variable.trainable:
                continue
            name = _unique(f"{home.name}.{variable.name}" if home is not None and home.name else str(variable.name), self.names.values())
            self.names[id(variable)] = name
            (self.parameters if id(variable) in weights or variable.trainable else self.buffers)[name] = variable
        self.signature = self.sign()

    @property
    def built(self) -> bool:
        """Do the variables exist yet?"""
        return bool(self.parameters)

    def sign(self) -> tuple[int, ...]:
        """Differs once layers were built, frozen or unfrozen."""
        return (len(self.model.variables), *(index for index, variable in enumerate(self.parameters.values()) if variable.trainable))

    def name(self, variable: Any) -> str:
        """A variable's name; one that belongs to no layer has its Keras path."""
        return self.names.get(id(variable)) or str(getattr(variable, "path", variable)).replace("/", ".")

    def order(self, calls: dict[str, int]) -> None:
        """Take over the order in which the forward called the leaf layers. A layer that holds others stands where the first of them does, a cell
        where its layer does."""
        last = len(calls)
        for place in self.places:
            inside = [at for name, at in calls.items() if _below(place.name, name)]
            around = [at for name, at in calls.items() if _below(name, place.name)]
            self.depth[place.name] = min(inside or around, default=last)

    def elements(self) -> int:
        """Elements of all parameters and buffers."""
        return sum(_numel(variable) for variable in [*self.parameters.values(), *self.buffers.values()])

    # ---- subjects

    def subjects(self, owned: dict[str, tuple[str, ...]]) -> list[Subject]:
        """Parameters and buffers as the rules know them."""
        group = {name: optimizer for optimizer, names in owned.items() for name in names}
        found = []
        for kind, variables in (("parameter", self.parameters), ("buffer", self.buffers)):
            for name, variable in variables.items():
                home = self.home.get(id(variable))
                found.append(
                    Subject(
                        name=name,
                        kind=kind,
                        module=home.name if home is not None else "",
                        module_type=type(home.layer).__name__ if home is not None else "",
                        depth=self.depth.get(home.name, -1) if home is not None else -1,
                        shape=tuple(int(size) for size in variable.shape),
                        dtype=str(variable.dtype),
                        trainable=kind == "parameter" and bool(variable.trainable),
                        group=group.get(name, ""),
                        role=self._role(variable, home) if kind == "parameter" else "",
                    )
                )
        return found

    def activation(self, name: str, shape: Sequence[int | None], dtype: str) -> Subject:
        """The activation of a layer. ``shape`` as it was traced; an unknown size is 0."""
        place = next(place for place in self.places if place.name == name)
        function = function_of(place.layer)
        role = "output" if id(place.layer) in self.outputs else ""
        if (
            not role
            and function in ("sigmoid", "hard_sigmoid", "tanh", "softmax")
            and any(type(user).__name__ in ("Multiply", "Dot") for user in consumers(place.layer))
        ):
            role = "gate"
        if isinstance(place.layer, keras.layers.RNN) and type(place.layer).__name__ != "SimpleRNN":
            role = "gate"
        return Subject(
            name=name,
            kind="activation",
            module=name,
            module_type=type(place.layer).__name__,
            depth=self.depth.get(name, -1),
            shape=tuple(int(size or 0) for size in shape),
            dtype=dtype,
            trainable=False,
            role=role,
            function=function,
        )

    def _role(self, variable: Any, home: Place | None) -> str:
        if home is None:
            return ""
        layer, leaf = home.layer, str(variable.name)
        if "Embedding" in type(layer).__name__ and leaf.endswith("embeddings"):
            return "embedding"
        if is_norm(layer):
            return "norm"
        if leaf.startswith("bias"):
            return "bias-before-norm" if any(removes_bias(user) for user in consumers(layer)) and not function_of(layer) else "bias"
        return "output" if id(layer) in self.outputs else ""


def function_of(layer: Any) -> str:
    """The activation function whose value a layer's output is ("relu", "sigmoid", "gelu", …); "" where there is none or it cannot be known.

    Only layers of Keras itself are read: a user's own layer may apply its ``activation`` anywhere.
    """
    kind = type(layer).__name__
    if not type(layer).__module__.startswith("keras."):
        return ""
    if kind == "ReLU":
        return "leaky_relu" if float(getattr(layer, "negative_slope", 0.0) or 0.0) > 0 else "relu"
    if kind in LAYERS:
        return LAYERS[kind]
    if kind not in SHOWN and "Conv" not in kind:
        return ""
    function = getattr(layer, "activation", None)
    if function is None or kind.startswith("ConvLSTM"):
        return ""
    name = str(getattr(function, "__name__", type(function).__name__)).lower()
    return NAMES.get(name, name)


def unit_axis(layer: Any, rank: int) -> int:
    """The axis of a layer's output that counts its units (channels)."""
    order = getattr(layer, "data_format", None) or (keras.config.image_data_format() if rank >= 4 else "channels_last")
    return 1 if order == "channels_first" and rank > 2 else rank - 1


def is_norm(layer: Any) -> bool:
    """A normalisation layer, of Keras or named like one."""
    return "norm" in type(layer).__name__.lower()


def removes_bias(layer: Any) -> bool:
    """Does the layer subtract a mean per channel, so that a bias in front of it has no effect?"""
    return type(layer).__name__ in ("BatchNormalization", "SyncBatchNormalization", "GroupNormalization")


def consumers(layer: Any) -> list[Any]:
    """The layers that read a layer's output, as far as the model was built from symbolic tensors."""
    return [node.operation for node in getattr(layer, "_outbound_nodes", ()) if getattr(node, "operation", None) is not None]


def _output_layers(model: Any) -> Iterator[int]:
    functional = getattr(model, "_functional", None) or model
    try:
        outputs = functional.outputs
    except (AttributeError, ValueError):  # a subclassed model has none
        outputs = None
    if not outputs:
        layers = getattr(model, "layers", ())
        if isinstance(model, keras.Sequential) and layers:
            yield id(layers[-1])
        return
    for tensor in outputs:
        operation = getattr(getattr(tensor, "_keras_history", None), "operation", None)
        if operation is not None:
            yield id(operation)


def _below(outer: str, name: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _walk(model: Any) -> Iterator[Place]:
    """The model, then its layers depth-first in the order they are kept, each once, under the first name it is found by."""
    seen: set[int] = {id(model)}
    taken: set[str] = set()

    def below(layer: Any, name: str, inside: bool) -> Iterator[Place]:
        children = list(getattr(layer, "_layers", ()))
        single = isinstance(layer, keras.layers.RNN | keras.layers.TimeDistributed)
        yield Place(name, layer, leaf=not inside and (single or not children))
        for child in children:
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = _unique(f"{name}.{child.name}" if name else str(child.name), taken)
            taken.add(path)
            yield from below(child, path, inside or single)

    yield from below(model, "", False)


def _unique(name: str, taken: Any) -> str:
    known = set(taken)
    if name not in known:
        return name
    return next(f"{name}#{index}" for index in range(1, len(known) + 2) if f"{name}#{index}" not in known)


def _numel(variable: Any) -> int:
    count = 1
    for size in variable.shape:
        count *= int(size)
    return count

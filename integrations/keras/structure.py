"""The layers of a model as the rules know them: their kind, widths, mode and places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from trainvet.integrations.keras.plan import Plan, function_of, is_norm
from trainvet.statistics import Layer, Subject

# layers that change the form and not one element
TRANSPARENT = frozenset({"Reshape", "Flatten", "Permute", "Identity", "InputLayer"})
KINDS = (
    ("convolution", ("Conv1D", "Conv2D", "Conv3D", "SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D")),
    ("convolution", ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")),
    ("linear", ("Dense", "EinsumDense")),
    ("recurrent", ("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")),
    ("attention", ("MultiHeadAttention", "GroupedQueryAttention", "Attention", "AdditiveAttention")),
    ("embedding", ("Embedding",)),
    ("batch_norm", ("BatchNormalization", "SyncBatchNormalization")),
    ("norm", ("Rescaling", "Normalization")),
    ("dropout", ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout", "GaussianDropout")),
    ("activation", ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "SELU", "GELU")),
)
LINEAR = frozenset({"Dense", "EinsumDense"} | {name for kind, names in KINDS if kind == "convolution" for name in names})


def mode_of(layer: Any, kwargs: Mapping[str, Any]) -> bool | None:
    """Is the layer called in training mode? None where it does not show."""
    if not getattr(layer, "_call_has_training_arg", False) and "training" not in kwargs:
        try:
            training = layer._get_call_context().training
        except AttributeError:  # a Keras that keeps the mode elsewhere
            return None
    else:
        training = bool(kwargs.get("training"))
    if training is None:
        return None
    return bool(training) and (layer.trainable or kind_of(layer) != "batch_norm")


def kind_of(layer: Any) -> str:
    """The kind of a layer, as in ``statistics.Layer``; a user's own by what it inherits from."""
    names = [item.__name__ for item in type(layer).__mro__ if item.__module__.startswith("keras.")]
    for name in names[:2]:
        found = next((kind for kind, types in KINDS if name in types), "")
        if found:
            return found
        if "Pooling" in name:
            return "pooling"
    return "norm" if is_norm(layer) else "other"


def describe_layers(plan: Plan, given: Mapping[str, tuple[str, ...]]) -> tuple[Layer, ...]:
    """All leaf layers in the order of the forward."""
    found = []
    for place in plan.places:
        layer = place.layer
        if not place.leaf or not place.name or type(layer).__name__ in TRANSPARENT:
            continue
        kind, own = kind_of(layer), [variable for variable in layer.variables if id(variable) in plan.names]
        wide, narrow = widths(layer, kind)
        found.append(
            Layer(
                name=place.name,
                type=type(layer).__name__,
                kind=kind,
                function=function_of(layer),
                depth=plan.depth.get(place.name, -1),
                bias=getattr(layer, "bias", None) is not None and bool(getattr(layer, "use_bias", True)),
                width_in=wide,
                width_out=narrow,
                rate=float(getattr(layer, "rate", 0.0) or 0.0) if kind == "dropout" else 0.0,
                momentum=float(getattr(layer, "momentum", 0.0)) if kind == "batch_norm" else 0.0,
                owns=any(plan.names[id(variable)] in plan.parameters for variable in own),
                trainable=any(variable.trainable for variable in own if plan.names[id(variable)] in plan.parameters),
                after=given.get(place.name, ()),
            )
        )
    return tuple(sorted(found, key=lambda layer: layer.depth if layer.depth >= 0 else len(plan.places)))


def subjects(plan: Plan, names: Mapping[str, int]) -> Iterator[Subject]:
    """The rows of table "module"."""
    for place in plan.places:
        if place.name in names:
            layer = place.layer
            yield Subject(
                place.name, "module", place.name, type(layer).__name__, plan.depth.get(place.name, -1), trainable=bool(layer.trainable_variables)
            )


def widths(layer: Any, kind: str) -> tuple[int, int]:
    """Features or channels that go in and come out; 0 where it is not known."""
    if kind == "embedding":
        return int(layer.input_dim), int(layer.output_dim)
    if kind in ("batch_norm", "norm"):
        size = next((int(variable.shape[0]) for variable in layer.variables if len(variable.shape) == 1), 0)
        return size, size
    kernel = getattr(layer, "_kernel", None) if kind in ("linear", "convolution") else None
    if kernel is not None and len(kernel.shape) >= 2 and type(layer).__name__ != "EinsumDense":
        turned = "Transpose" in type(layer).__name__
        wide, narrow = int(kernel.shape[-2]), int(kernel.shape[-1])
        return (narrow, wide) if turned else (wide, narrow)
    return 0, int(getattr(layer, "units", 0) or 0) if isinstance(getattr(layer, "units", 0), int) else 0


def shared(plan: Plan) -> tuple[str, ...]:
    """Layers that own parameters and are applied to what they made themselves, as "name = name#1".

    Calls side by side, as on two inputs that are compared, are how a graph shares a layer on purpose.
    """
    calls: dict[int, list[Any]] = {}
    for place in plan.places:
        graph = getattr(place.layer, "_functional", None) or place.layer
        by_depth = getattr(graph, "_nodes_by_depth", None) if isinstance(graph, keras.Model) else None
        for node in (node for nodes in (by_depth or {}).values() for node in nodes):
            calls.setdefault(id(node.operation), []).append(node)
    return tuple(
        f"{place.name} = {place.name}#1"
        for place in plan.places
        if place.name and place.layer.weights and fed_by_itself(calls.get(id(place.layer), []))
    )


def fed_by_itself(calls: list[Any]) -> bool:
    """Does what one of these calls made reach another of them?"""
    own, seen = set(map(id, calls)), set[int]()
    waiting = [parent for call in calls for parent in call.parent_nodes] if len(calls) > 1 else []
    while waiting:
        node = waiting.pop()
        if id(node) in own:
            return True
        if id(node) not in seen:
            seen.add(id(node))
            waiting += node.parent_nodes
    return False

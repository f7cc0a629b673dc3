"""What made the prediction that a loss function is given: read from its autograd graph, before the backward frees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

# autograd nodes (without "Backward" and the number) of activations, of layers that are linear in their input, and of what changes only the form
FUNCTIONS = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid", "LogSigmoid": "log_sigmoid", "Tanh": "tanh", "Relu": "relu",
    "LeakyRelu": "leaky_relu", "Gelu": "gelu", "Silu": "silu", "Softplus": "softplus", "Hardsigmoid": "hard_sigmoid", "Prelu": "prelu",
    "PreluKernel": "prelu", "Mish": "mish", "Hardswish": "hard_swish",
}  # fmt: skip
LINEAR = frozenset({"Addmm", "Mm", "Linear", "Convolution", "MkldnnConvolution", "MkldnnLinear"})
THROUGH = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Clone", "ToCopy", "Alias", "Expand", "Slice",
    "Select", "Index", "IndexSelect", "Gather", "Split", "SplitWithSizes", "Unbind", "MaskedSelect", "AsStrided",
})  # fmt: skip
LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)
DEEP = 32  # nodes to follow at most

# id of an autograd node -> (the node, so that its id is not given away again; path and object of the module that returned it)
Made = Mapping[int, "tuple[Any, str, nn.Module]"]
Axis = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Origin:
    """``function``: the last activation, "linear", or "" (not known); ``axis`` of a softmax in the prediction's own shape, counted from 0
    (-1: not known); ``layer``: path of the module that it came from."""

    function: str = ""
    axis: int = -1
    layer: str = ""


def origin_of(prediction: Tensor, made: Made) -> Origin:
    """Follow the graph from ``prediction`` through nothing but reshaping, slicing and copies to the function and the layer that made it."""
    node, shape = prediction.grad_fn, tuple(prediction.shape)
    known: tuple[int, ...] | None = shape
    steps: list[Axis] = []
    function, layer, axis = "", "", -1
    for _ in range(DEEP):
        if node is None:
            break
        _, path, module = made.get(id(node), (None, "", None))
        layer = layer or path
        if function and layer:
            break
        name = kind(node)
        found = "" if function else _function(node, name, module)
        if found:
            function = found
            axis = _axis(node, known, steps) if name in ("Softmax", "LogSoftmax") else -1
            if name == "Log":
                node = _first(node)
        elif name in THROUGH:
            step, known = _form(node, name, known)
            steps.append(step)
        else:
            break
        node = _first(node)
    return Origin(function, axis if len(shape) > 1 else -1, layer)


def kind(node: Any) -> str:
    """ "SoftmaxBackward0" -> "Softmax"."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _first(node: Any) -> Any:
    return node.next_functions[0][0] if node.next_functions else None


def _function(node: Any, name: str, module: nn.Module | None) -> str:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name == "Elu":
        return "selu" if abs(float(node._saved_scale) - 1) > 1e-6 else "elu"
    if name == "Hardtanh":
        low = float(node._saved_min_val)
        return "relu" if low == 0 else "hard_tanh"
    if name in ("Clamp", "ClampMin"):
        low, high = node._saved_min, getattr(node, "_saved_max", None)
        return "relu" if high is None and isinstance(low, int | float) and low == 0 else ""
    if name == "Log":  # the logarithm of probabilities is what the log form would have given
        inner = kind(_first(node))
        return {"Softmax": "log_softmax", "Sigmoid": "log_sigmoid"}.get(inner, "")
    if isinstance(module, LAYERS) or name in ("Convolution", "Linear"):
        return "linear"
    return "linear" if name in LINEAR and any(_leaf(child) for child, _ in node.next_functions) else ""


def _leaf(node: Any) -> bool:
    """Is this a parameter, perhaps transposed?"""
    for _ in range(3):
        if node is None:
            return False
        if type(node).__name__ == "AccumulateGrad":
            return True
        if kind(node) not in ("T", "Transpose", "ToCopy"):
            return False
        node = _first(node)
    return False


def _axis(node: Any, known: tuple[int, ...] | None, steps: list[Axis]) -> int:
    """The axis of a softmax as the prediction shows it."""
    rank = len(known) if known is not None else node._saved_result.dim()
    axis = signed(node._saved_dim) % max(1, rank)
    for step in reversed(steps):
        axis = step(axis) if axis >= 0 else -1
    return axis


def _form(node: Any, name: str, out: tuple[int, ...] | None) -> tuple[Axis, tuple[int, ...] | None]:
    """How one change of form maps an axis of its input to its output, and the shape of the input; ``out`` is that of the output."""
    if out is None:
        return _lost, None
    if name in ("Clone", "ToCopy", "Alias"):
        return int, out
    if name == "T":
        return lambda axis: len(out) - 1 - axis, out[::-1]
    if name == "Transpose":
        left, right = signed(node._saved_dim0) % len(out), signed(node._saved_dim1) % len(out)
        shape = list(out)
        shape[left], shape[right] = shape[right], shape[left]
        return lambda axis: {left: right, right: left}.get(axis, axis), tuple(shape)
    if name == "Permute":
        order = [signed(dim) % len(out) for dim in node._saved_dims]
        shape = [0] * len(out)
        for place, source in enumerate(order):
            shape[source] = out[place]
        return order.index, tuple(shape)
    if name == "Unsqueeze":
        place = signed(node._saved_dim) % len(out)
        return lambda axis: axis + (axis >= place), out[:place] + out[place + 1 :]
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        return _lost, None
    into = tuple(int(size) for size in sizes)
    if name in ("Slice", "Expand"):
        grown = len(out) - len(into)
        return lambda axis: axis + grown, into
    if name == "Select":
        place = signed(node._saved_dim) % len(into)
        return lambda axis: -1 if axis == place else axis - (axis > place), into
    if name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze"):
        return lambda axis: _viewed(axis, into, out), into
    return _lost, into


def _lost(axis: int) -> int:
    return -1


def _viewed(axis: int, into: tuple[int, ...], out: tuple[int, ...]) -> int:
    """Where an axis is after a view: the same size with as many elements before it; -1 where it was split or merged."""
    before = _product(into[:axis])
    places = [place for place, size in enumerate(out) if size == into[axis] and _product(out[:place]) == before]
    return places[-1] if places and into[axis] != 1 else -1


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def signed(value: int) -> int:
    """An axis as autograd keeps it, in an unsigned number."""
    return value - (1 << 64) if value >= 1 << 63 else value

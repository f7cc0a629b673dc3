"""Which loss is minimised, what it expects and where labels and inputs sit in the batch: seen from the calls to torch's loss functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainvet.integrations.torch.moments import Number
from trainvet.integrations.torch.origins import Origin
from trainvet.statistics import Loss

KINDS: dict[Callable[..., Any], str] = {
    F.cross_entropy: "cross_entropy",
    F.nll_loss: "cross_entropy",
    F.binary_cross_entropy: "binary_cross_entropy",
    F.binary_cross_entropy_with_logits: "binary_cross_entropy",
    F.mse_loss: "regression",
    F.l1_loss: "other_regression",
    F.smooth_l1_loss: "other_regression",
    F.huber_loss: "other_regression",
    F.kl_div: "unknown",
    F.poisson_nll_loss: "unknown",
    F.gaussian_nll_loss: "unknown",
}
EXPECTS: dict[Callable[..., Any], str] = {
    F.cross_entropy: "logits",
    F.nll_loss: "log_probabilities",
    F.binary_cross_entropy: "probabilities",
    F.binary_cross_entropy_with_logits: "logits",
    F.mse_loss: "values",
    F.l1_loss: "values",
    F.smooth_l1_loss: "values",
    F.huber_loss: "values",
    F.kl_div: "log_probabilities",
}
EITHER_WAY = frozenset({F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss})  # prediction and label may be exchanged
IGNORED = -100  # torch's default


@dataclasses.dataclass
class Call:
    """One call of a loss function: prediction and label as they were handed over.

    ``shape`` is the prediction's; the prediction itself is reduced to ``numbers`` at once and not kept. ``axis`` holds the classes (None: there
    are none). ``result`` is what came out, where that is a scalar. ``class_weights`` [classes] weigh labels, ``ignored`` is the index the loss
    leaves out. ``sample_weights``: 1 where the unreduced losses were multiplied with other numbers than 0 and 1. ``target_made``: the label was made
    in the step, or is learned itself; ``by_hand``: no loss function was called, the loss is written out.
    """

    kind: str
    function: str
    expects: str
    label: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduction: str
    weighted: bool
    smoothed: bool
    axis: int | None = None
    result: Tensor | None = None
    class_weights: Tensor | None = None
    ignored: int | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    numbers: dict[str, Number] = dataclasses.field(default_factory=dict)
    sample_weights: Tensor | None = None
    target_made: bool = False
    by_hand: bool = False

    @property
    def classes(self) -> int:
        """How many classes the loss has room for; 0 where it knows none."""
        if self.kind == "cross_entropy":
            return self.shape[self.axis] if self.axis is not None else 0
        return 2 if self.kind == "binary_cross_entropy" else 0

    @property
    def indices(self) -> bool:
        """Are the labels class indices?"""
        return self.kind == "cross_entropy" and not self.label.is_floating_point()


def prediction_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Prediction and label of a call of a loss function; None where its arguments are unusual."""
    tensors = [*args[:2], *(kwargs[name] for name in ("input", "target") if name in kwargs)]
    if len(tensors) < 2 or not isinstance(tensors[0], Tensor) or not isinstance(tensors[1], Tensor):
        return None
    prediction, label = tensors[:2]
    if function in EITHER_WAY and label.requires_grad and not prediction.requires_grad:
        prediction, label = label, prediction
    return prediction, label


def read_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Tensor] | None:
    """A call of a loss function as data, and its prediction; None where ``function`` is not one or its arguments are unusual."""
    kind = KINDS.get(function)
    pair = prediction_of(function, args, kwargs) if kind is not None else None
    if kind is None or pair is None:
        return None
    prediction, label = pair
    weight = kwargs.get("weight", args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None)
    positive = kwargs.get("pos_weight")
    class_weights, axis, ignored = None, None, None
    if kind == "cross_entropy":
        axis = 1 if prediction.dim() > 1 else 0
        class_weights = weight if isinstance(weight, Tensor) and weight.dim() == 1 else None
        ignored = int(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED))
    elif kind == "binary_cross_entropy":
        axis = 1 if prediction.dim() > 1 else None
        if isinstance(positive, Tensor) and positive.numel() == 1:
            class_weights = torch.cat([torch.ones_like(positive.detach().reshape(1)), positive.detach().reshape(1)])
    elif kind == "unknown" and prediction.dim() > 1:
        axis = 1
    smoothing = kwargs.get("label_smoothing", args[7] if function is F.cross_entropy and len(args) > 7 else 0.0)
    call = Call(
        kind,
        function.__name__,
        EXPECTS.get(function, ""),
        label,
        tuple(prediction.shape),
        prediction.dtype,
        str(kwargs.get("reduction", "mean")),
        weight is not None or positive is not None,
        bool(smoothing),
        axis,
        class_weights=class_weights,
        ignored=ignored,
    )
    return call, prediction


def matches(call: Call, value: float) -> bool:
    """Did the call return ``value``?"""
    whole = float(call.result) if call.result is not None else math.nan
    return math.isclose(whole, value, rel_tol=1e-4, abs_tol=1e-12)


def describe(call: Call, name: str, value: float | None, label: str = "label", output: str = "output") -> Loss:
    """What the rules need to know of a loss whose minimised value is ``value``; kind "unknown" where the call is only a part of it.

    ``value`` None: a part that is described by itself.
    """
    known = call.kind in ("cross_entropy", "binary_cross_entropy", "regression")
    known = known and (value is None or matches(call, value))
    samples = math.prod(call.shape) // max(1, call.classes) if call.kind == "cross_entropy" else call.label.numel()
    weighted = call.weighted or (call.sample_weights is not None and bool(call.sample_weights))
    return Loss(
        name,
        call.kind if known else "unknown",
        call.classes,
        int(samples),
        call.reduction,
        weighted,
        call.smoothed,
        call.function,
        call.expects,
        call.origin.function,
        call.origin.axis,
        call.origin.layer,
        label,
        output,
    )


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested lists, tuples, dicts and dataclasses, with the path to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth > 6:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}" if path else str(index), depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{path}.{field.name}" if path else field.name, depth + 1)


def same(left: Tensor, right: Tensor) -> bool:
    """Do two tensors show the same memory (one may be a view or a flattened form of the other)?"""
    return left is right or (left.device.type != "meta" and left.numel() == right.numel() and left.data_ptr() == right.data_ptr() != 0)

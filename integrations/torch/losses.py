"""Which loss is minimised, what it expects and where labels and inputs sit in the batch: seen from the calls to torch's loss functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


@dataclasses.dataclass
class Call:
    """One call of a loss function: prediction and label as they were handed over, and what came out."""

    kind: str
    prediction: Tensor
    label: Tensor
    result: Tensor
    reduction: str
    weighted: bool
    smoothed: bool


def read_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """A loss call as data; None where ``function`` is not a loss function or its arguments are unusual."""
    kind = KINDS.get(function)
    if kind is None or not isinstance(result, Tensor):
        return None
    tensors = [*args[:2], *(kwargs[name] for name in ("input", "target") if name in kwargs)]
    if len(tensors) < 2:
        return None
    if not isinstance(tensors[0], Tensor) or not isinstance(tensors[1], Tensor):
        return None
    weight = kwargs.get("weight", args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None)
    positive = kwargs.get("pos_weight")
    return Call(
        kind,
        tensors[0],
        tensors[1],
        result,
        str(kwargs.get("reduction", "mean")),
        weight is not None or positive is not None,
        bool(kwargs.get("label_smoothing", 0.0)),
    )


def describe(call: Call, name: str, value: float) -> Loss:
    """What the rules need to know of a loss whose minimised value is ``value``; kind "unknown" where the call is only a part of it."""
    whole = float(call.result.detach()) if call.result.dim() == 0 else math.nan
    samples = int(call.label.shape[0]) if call.label.dim() else 1
    pure = math.isclose(whole, value, rel_tol=1e-4, abs_tol=1e-12)
    known = pure and call.kind in ("cross_entropy", "binary_cross_entropy", "regression")
    classes = 0
    if call.kind == "cross_entropy" and call.prediction.dim() >= 2:
        classes = int(call.prediction.shape[1])
    elif call.kind == "binary_cross_entropy":
        classes = 2
    if call.kind == "cross_entropy":
        samples = int(call.prediction.numel() // max(1, classes)) if classes else samples
    elif call.kind != "cross_entropy":
        samples = int(call.label.numel())
    return Loss(name, call.kind if known else "unknown", classes, samples, call.reduction, call.weighted or call.smoothed)


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


def is_loss_function(function: Any) -> bool:
    """Is this one of torch's loss functions?"""
    return callable(function) and getattr(function, "__module__", "") == torch.nn.functional.__name__ and function in KINDS

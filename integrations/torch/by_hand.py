"""Squared and absolute errors that are written out, ``((prediction - label) ** 2).mean()``: seen from the three operations that make them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainvet.integrations.torch.losses import Call
from trainvet.integrations.torch.moments import usable

DIFFERENCES = frozenset({torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__})
POWERS = frozenset({torch.pow, Tensor.pow, Tensor.__pow__})
SQUARES = frozenset({torch.square, Tensor.square})
SIZES = frozenset({torch.abs, Tensor.abs, Tensor.__abs__})
MEANS, SUMS = frozenset({torch.mean, Tensor.mean}), frozenset({torch.sum, Tensor.sum})
OPERATIONS = DIFFERENCES | POWERS | SQUARES | SIZES | MEANS | SUMS
MOST = 8  # differences and what is made of them that are followed at a time


@dataclasses.dataclass
class Error:
    """A tensor on its way from a difference to a loss. ``kind`` is "" for the difference itself."""

    tensor: weakref.ref[Tensor]
    prediction: Tensor
    label: Tensor
    kind: str = ""


class ByHand:
    """Follows differences between something that is learned and something that is not through one forward."""

    def __init__(self) -> None:
        self._errors: dict[int, Error] = {}

    def forget(self) -> None:
        """The forward is over."""
        self._errors.clear()

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[Call, Tensor] | None:
        """One of the operations was called; the call of a loss and its prediction, where that completes one."""
        if not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
            return None
        if function in DIFFERENCES:
            self._difference(args, result)
            return None
        found = self._errors.get(id(args[0]))
        if found is None or found.tensor() is not args[0]:
            return None
        if not found.kind:
            exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
            squared = function in SQUARES or (function in POWERS and isinstance(exponent, int | float) and exponent == 2)
            if squared or function in SIZES:
                kind = "regression" if squared else "other_regression"
                self._follow(dataclasses.replace(found, tensor=weakref.ref(result), kind=kind), result)
            return None
        if function not in MEANS | SUMS or result.dim():
            return None
        prediction, label = found.prediction, found.label
        return Call(
            found.kind,
            "squared error" if found.kind == "regression" else "absolute error",
            "values",
            label,
            tuple(prediction.shape),
            prediction.dtype,
            "mean" if function in MEANS else "sum",
            weighted=False,
            smoothed=False,
            result=result.detach(),
            by_hand=True,
        ), prediction

    def _difference(self, args: tuple[Any, ...], result: Tensor) -> None:
        left, right = args[0], args[1] if len(args) > 1 else None
        if not isinstance(right, Tensor) or left.shape != right.shape or left.requires_grad is right.requires_grad:
            return
        prediction, label = (left, right) if left.requires_grad else (right, left)
        if prediction.grad_fn is not None and prediction.is_floating_point() and usable(prediction) and usable(label):
            self._follow(Error(weakref.ref(result), prediction, label), result)

    def _follow(self, error: Error, result: Tensor) -> None:
        self._errors.pop(id(result), None)
        self._errors[id(result)] = error
        if len(self._errors) > MOST:
            del self._errors[next(iter(self._errors))]

"""What one activation is reduced to: through numpy in host memory, in one pass and without a host read elsewhere."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Number: TypeAlias = "Tensor | float"
# |x| beyond which the slope is below 5 % of its maximum, expressed in the output: sigmoid(4.36), tanh(2.18)
SATURATED = {"sigmoid": (1 - 0.98738, 0.98738), "tanh": (-0.97477, 0.97477)}
MOMENTS = frozenset({"mean", "std", "rms"})
Moments: TypeAlias = "tuple[Number, Number, Number, Number, dict[str, Number]]"


def on_host(wide: Tensor, function: str, want: frozenset[str]) -> Moments:
    """Mean, sum of squared deviations, smallest, largest, and counts, as host numbers: through numpy, which is quicker on small tensors.

    Only what is wanted is measured, the rest is 0. The spread comes from a sum and a dot product unless they cancel; a finite norm spares the
    counting.
    """
    values = wide.numpy().ravel(order="K")
    count = values.size
    mean = variance = smallest = largest = 0.0
    with np.errstate(all="ignore"):  # NaN and infinity are what we look for, not worth a warning
        square = float(values.dot(values)) / count
        if want & MOMENTS:
            mean = float(np.add.reduce(values)) / count
            variance = square - mean * mean
            if not variance > 1e-3 * square:  # a large mean: the difference of two large numbers would be rounding only
                variance = float(values.var(dtype=np.float64))
        if want & {"min", "abs_max"}:
            smallest = float(np.minimum.reduce(values))
        if want & {"max", "abs_max"}:
            largest = float(np.maximum.reduce(values))
        new: dict[str, Number] = {}
        if "zero_share" in want:
            new["zero"] = float(count - np.count_nonzero(values))
        for key, test in (("nan", np.isnan), ("inf", np.isinf)):
            if key in want:
                new[key] = 0.0 if math.isfinite(square) else float(np.count_nonzero(test(values)))
        if "saturated_share" in want and function in SATURATED:
            low, high = SATURATED[function]
            new["saturated"] = float(np.count_nonzero(values < low) + np.count_nonzero(values > high))
        return mean, variance * count, smallest, largest, new


def on_device(wide: Tensor, function: str, want: frozenset[str]) -> Moments:
    """The same as device scalars, without a host read."""
    count = wide.numel()
    variance, mean = torch.var_mean(wide, correction=0) if want & MOMENTS else (0.0, 0.0)
    smallest, largest = torch.aminmax(wide)
    new: dict[str, Number] = {}
    if "zero_share" in want:
        new["zero"] = count - torch.count_nonzero(wide)
    for key, test in (("nan", torch.isnan), ("inf", torch.isinf)):
        if key in want:
            new[key] = torch.count_nonzero(test(wide))
    if "saturated_share" in want and function in SATURATED:
        low, high = SATURATED[function]
        new["saturated"] = torch.count_nonzero((wide < low) | (wide > high))
    return mean, variance * count, smallest, largest, new


def smaller(left: Number, right: Number) -> Number:
    """The smaller of two numbers or device scalars; NaN where one is NaN."""
    if isinstance(left, Tensor):
        return torch.minimum(left, torch.as_tensor(right))
    return left if left != left or left < right else right


def usable(tensor: Tensor) -> bool:
    """Does the tensor have plain memory that can be read and reduced?"""
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_nested and not tensor.is_quantized

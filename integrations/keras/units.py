"""Where an activation function is flat, and what a softmax does with its rows; on TensorFlow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from trainvet.integrations.keras import kernels
from trainvet.integrations.keras.tap import tap


@dataclasses.dataclass(frozen=True)
class Limit:
    """A unit whose number never exceeds ``value`` never left the flat part; the number is the layer's input (``of_input``) or its output."""

    value: float
    of_input: bool = False


# layers whose input is that of the function; a Dense layer's activation is given something that does not show
ALONE = frozenset({"Activation", "PReLU", "GELU", "LeakyReLU", "ReLU", "ELU", "SELU"})
SELU = 1.0507009873554805 * 1.6732632423543772
ELU_FLOOR = math.expm1(-3.0)  # the value at -3, from where the slope is below 5 %
BY_OUTPUT = {"relu": 0.0, "relu6": 0.0, "leaky_relu": 0.0, "elu": ELU_FLOOR, "selu": SELU * ELU_FLOOR}
BY_INPUT = {"gelu": -3.0, "silu": -6.0, "prelu": 0.0}  # not monotone, or with a slope that is learnt


def flat_below(layer: Any, function: str) -> Limit | None:
    """The limit of the flat part; None for functions without one, and where only the output of one that is not monotone shows."""
    if function in BY_OUTPUT:
        alpha = float(getattr(layer, "alpha", 1.0)) if type(layer).__name__ == "ELU" else 1.0
        return Limit(BY_OUTPUT[function] * alpha)
    if function in BY_INPUT and type(layer).__name__ in ALONE:
        return Limit(BY_INPUT[function], of_input=True)
    return None


def along_batch(layer: Any, rank: int) -> bool:
    """Is this a softmax along axis 0 of a tensor with more than one?"""
    axis = getattr(layer, "axis", -1) if type(layer).__name__ == "Softmax" else -1
    return rank > 1 and isinstance(axis, int) and axis % rank == 0


def spans_batch(tensor: Any, batch: Any) -> Any:
    """1 where axis 0 is as long as the batch and no other one is; NaN for a batch of one sample, which says nothing."""
    sizes = tf.shape(tensor)
    alone = tf.logical_and(tf.equal(sizes[0], batch), tf.logical_not(tf.reduce_any(tf.equal(sizes[1:], batch))))
    return tf.where(tf.greater(batch, 1), tf.cast(alone, tf.float32), float("nan"))


def softmax_numbers(layer: Any, output: Any, given: Any, raw: frozenset[str]) -> dict[str, Any]:
    """Mean entropy of the rows over the logarithm of the entries that are not exactly 0; largest finite input where the layer is one of its own."""
    axis, found = getattr(layer, "axis", -1) if type(layer).__name__ == "Softmax" else -1, {}
    if "entropy" in raw:
        chosen = tf.reduce_sum(tf.cast(tf.greater(output, 0.0), tf.float32), axis)
        entropy = -tf.reduce_sum(tf.math.xlogy(output, output), axis)
        several = tf.cast(tf.greater(chosen, 1.0), tf.float32)
        shares = tf.math.divide_no_nan(entropy, tf.math.log(chosen)) * several
        found["entropy"] = tf.math.divide_no_nan(tf.reduce_sum(shares), tf.reduce_sum(several))
    if "input_abs_max" in raw and given is not None and type(layer).__name__ in ("Softmax", "Activation"):
        size = tf.abs(kernels.wide(tap(given)))
        found["input_abs_max"] = tf.reduce_max(tf.where(tf.math.is_finite(size), size, 0.0))
    return found

"""Reductions on TensorFlow, traced into the training step (or run eagerly). Every result is a float32 scalar that stays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SKETCH = 1024
ROWS = 64
UNIT_ROWS = 16
ONE_VECTOR = 1 << 26
# outputs beyond which the slope is below 5 % of its maximum: sigmoid(+-4.36), tanh(+-2.18); hard_sigmoid is flat at 0 and 1
SATURATED = {"sigmoid": (1 - 0.98738, 0.98738), "hard_sigmoid": (0.0126, 0.9873), "tanh": (-0.97477, 0.97477)}


def wide(tensor: Any) -> Any:
    """The tensor as float32."""
    return tensor if tensor.dtype == tf.float32 else tf.cast(tensor, tf.float32)


def stack(scalars: list[Any]) -> Any:
    """Scalars to one float32 vector."""
    return tf.stack([wide(tf.convert_to_tensor(scalar)) for scalar in scalars])


def reduce(tensor: Any, raw: frozenset[str]) -> dict[str, Any]:
    """Raw numbers (see ``layout.NEEDS``) over all elements of a float32 tensor."""
    found: dict[str, Any] = {}
    if "square" in raw:
        found["square"] = 2.0 * tf.nn.l2_loss(tensor)
    if "sum" in raw:
        found["sum"] = tf.reduce_sum(tensor)
    if "abs_sum" in raw:
        found["abs_sum"] = tf.reduce_sum(tf.abs(tensor))
    if "min" in raw:
        found["min"] = tf.reduce_min(tensor)
    if "max" in raw:
        found["max"] = tf.reduce_max(tensor)
    if "nonzero" in raw:
        found["nonzero"] = tf.reduce_sum(tf.cast(tf.not_equal(tensor, 0.0), tf.float32))
    if "variance" in raw:
        found["variance"] = tf.math.reduce_variance(tensor)
    if "nonfinite" in raw:
        found["nonfinite"] = tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(tensor)), tf.float32))
    return found


def counts(tensor: Any) -> tuple[Any, Any]:
    """The number of NaN and of infinite elements."""
    return tf.reduce_sum(tf.cast(tf.math.is_nan(tensor), tf.float32)), tf.reduce_sum(tf.cast(tf.math.is_inf(tensor), tf.float32))


def examine(tensors: Mapping[str, Any], squares: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Counts of NaN and infinite elements and the exact norm of each tensor, but only when some sum of squares is not finite or has
    vanished; otherwise zeros, and -1 for the norm. One branch for all tensors, so that healthy steps pay for one condition."""
    if not tensors:
        return {}
    sums = tf.stack([squares[name] for name in tensors])
    # below 1e-30 a sum of squares of non-zero elements is rounded away
    odd = tf.logical_or(tf.logical_not(tf.reduce_all(tf.math.is_finite(sums))), tf.reduce_any(tf.less(sums, 1e-30)))
    table = tf.cond(odd, lambda: _table(list(tensors.values())), lambda: tf.constant([[0.0, 0.0, -1.0]] * len(tensors)))
    columns = {raw: tf.unstack(table[:, index], num=len(tensors)) for index, raw in enumerate(("nan", "inf", "exact"))}
    return {name: {raw: column[index] for raw, column in columns.items()} for index, name in enumerate(tensors)}


def _table(tensors: list[Any]) -> Any:
    """[tensors, 3]: NaN, infinite elements, L2 norm of the finite ones (inf or NaN where an element is).

    All tensors in one vector keep the graph small; very large models are looked at tensor by tensor, since that vector is a copy.
    """
    if len(tensors) > 1 and sum(tensor.shape.num_elements() or ONE_VECTOR for tensor in tensors) >= ONE_VECTOR:
        return tf.concat([_table([tensor]) for tensor in tensors], 0)
    parts = [tf.reshape(tensor, [-1]) for tensor in tensors]
    flat, owner = tf.concat(parts, 0), tf.concat([tf.fill(tf.shape(part), index) for index, part in enumerate(parts)], 0)

    def total(values: Any) -> Any:
        return tf.math.unsorted_segment_sum(values, owner, len(tensors))

    nan, inf = total(tf.cast(tf.math.is_nan(flat), tf.float32)), total(tf.cast(tf.math.is_inf(flat), tf.float32))
    size = tf.maximum(tf.math.unsorted_segment_max(tf.abs(flat), owner, len(tensors)), 0.0)
    norm = size * tf.sqrt(total(tf.math.divide_no_nan(flat, tf.gather(size, owner)) ** 2))
    norm = tf.where(inf > 0, np.float32(np.inf), norm)
    return tf.stack([nan, inf, tf.where(nan > 0, np.float32(np.nan), norm)], 1)


def identical(tensors: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, Any]:
    """1 for each tensor whose units (slices along ``axes[name]``) are all equal.

    A few rows chosen at random decide for nearly every tensor; only where they are equal is the whole looked at.
    """
    chosen = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) >= 2 and int(tensor.shape[axes[name]]) >= 2}
    if not chosen:
        return {}
    generator = np.random.default_rng(0x5EED)
    flat, candidates = {}, []
    for name, tensor in chosen.items():
        units = int(tensor.shape[axes[name]])
        flat[name] = tf.reshape(tensor, [-1, units]) if axes[name] else tf.transpose(tf.reshape(tensor, [units, -1]))
        total = int(np.prod([int(size) for size in tensor.shape])) // units
        rows = np.sort(generator.choice(total, size=min(UNIT_ROWS, total), replace=False))
        candidates.append(_equal_units(tf.gather(flat[name], rows.astype(np.int32))))
    marks = tf.stack(candidates)

    def look() -> Any:
        return tf.stack([_equal_units(tensor) for tensor in flat.values()])

    marks = tf.cond(tf.reduce_any(marks), look, lambda: marks)
    return {name: tf.cast(marks[index], tf.float32) for index, name in enumerate(chosen)}


def _equal_units(table: Any) -> Any:
    return tf.reduce_all(tf.equal(table, table[:, :1]))


def merge_rows(slices: Any) -> tuple[Any, Any]:
    """Values [n, …] of IndexedSlices with the rows of equal indices summed into one (the freed rows are 0), and the number of rows touched."""
    order = tf.argsort(slices.indices)
    indices = tf.gather(slices.indices, order)
    first = tf.concat([tf.zeros([1], tf.int32), tf.cast(tf.not_equal(indices[1:], indices[:-1]), tf.int32)], 0)
    segment = tf.cumsum(first)
    count = tf.shape(slices.indices)[0]
    return tf.math.unsorted_segment_sum(tf.gather(wide(slices.values), order), segment, count), tf.reduce_max(segment) + 1


def reduce_rows(slices: Any, numel: float, raw: frozenset[str]) -> tuple[dict[str, Any], Any]:
    """Raw numbers over the whole table of which ``slices`` holds the touched rows; the others count as 0. Also the summed rows."""
    rows, _ = merge_rows(slices)
    found = reduce(rows, (raw - {"variance", "min", "max"}) | ({"sum", "square"} if "variance" in raw else frozenset()))
    if "variance" in raw:
        found["variance"] = tf.maximum(found["square"] / numel - (found["sum"] / numel) ** 2, 0.0)
    if "min" in raw:
        found["min"] = tf.minimum(tf.reduce_min(rows), 0.0)
    if "max" in raw:
        found["max"] = tf.maximum(tf.reduce_max(rows), 0.0)
    return found, rows


class Sketch:
    """A fixed random sample of each variable's elements, read before and after an update.

    Up to 1,024 elements, chosen by a generator of our own; of a table whose gradient touches some rows only, the first 64 of those rows,
    since the others do not move. Elements are gathered from the resource, so a large variable is not copied.
    """

    def __init__(self, variables: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        generator = np.random.default_rng(0x5EED)
        self.variables = variables
        self.indices: dict[str, Any] = {}
        self.counts: dict[str, float] = {}
        for name, variable in variables.items():
            shape = tuple(int(size) for size in variable.shape)
            numel = int(np.prod(shape))
            gradient = gradients.get(name)
            if numel <= SKETCH:
                self.counts[name] = numel
            elif isinstance(gradient, tf.IndexedSlices):
                self.indices[name] = gradient.indices[:ROWS][:, None]
            else:
                flat = np.sort(generator.choice(numel, size=SKETCH, replace=False))
                self.indices[name] = np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int32 if numel < 2**31 else np.int64)
                self.counts[name] = SKETCH
        self.before = {name: self._pick(name) for name in variables}

    def compare(self) -> dict[str, dict[str, Any]]:
        """After the update: squared norms of the change and of the values before, whether nothing moved, elements compared."""
        found = {}
        for name in self.variables:
            old, new = self.before[name], self._pick(name)
            found[name] = {
                "square": 2.0 * tf.nn.l2_loss(wide(new) - wide(old)),
                "before": 2.0 * tf.nn.l2_loss(wide(old)),
                "unchanged": tf.cast(tf.reduce_all(tf.equal(new, old)), tf.float32),
            }
            if name not in self.counts:
                found[name]["count"] = tf.cast(tf.size(old), tf.float32)
        return found

    def _pick(self, name: str) -> Any:
        variable = self.variables[name]
        value = variable.value if hasattr(variable, "value") and not callable(variable.value) else variable
        if name not in self.indices:
            return tf.identity(value)
        return tf.gather_nd(value, self.indices[name])


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Create the optimizer's variables as its ``apply`` would: inside a branch of a graph that is no longer possible."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True

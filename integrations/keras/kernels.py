"""Reductions on TensorFlow, traced into the training step (or run eagerly). Every result is a float32 scalar that stays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainvet.integrations.keras.tap import tap
from trainvet.statistics import limits_of

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


def inside(tensor: Any, low: float, high: float) -> Any:
    """Which elements of a float32 tensor lie between the limits, both included."""
    return tf.logical_and(tf.greater_equal(tensor, low), tf.less_equal(tensor, high))


class Reducer:
    """Reduces flat float32 tensors. Tracing an operation costs about a millisecond, so constants are shared and nothing is done twice."""

    def __init__(self) -> None:
        self._axis, self._flat, self._zero = tf.constant(0), tf.constant([-1]), tf.constant(0.0)

    def flat(self, tensor: Any, count: int | None = None) -> Any:
        """All elements in one dimension, as float32; there are ``count`` of them where that is known better than from the tensor."""
        tensor = wide(tensor)
        if count is not None and tensor.shape.num_elements() is None:
            return tf.reshape(tensor, [count])
        return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, self._flat)

    def total(self, flat: Any) -> Any:
        """The sum."""
        return tf.raw_ops.Sum(input=flat, axis=self._axis)

    def count(self, condition: Any) -> Any:
        """How many are true."""
        return self.total(tf.cast(condition, tf.float32))

    def reduce(self, flat: Any, raw: frozenset[str]) -> dict[str, Any]:
        """Raw numbers (see ``layout.NEEDS``) over all elements; "square" is half the sum of squares."""
        found: dict[str, Any] = {}
        if "square" in raw:
            found["square"] = tf.raw_ops.L2Loss(t=flat)
        if "sum" in raw:
            found["sum"] = self.total(flat)
        if "abs_sum" in raw:
            found["abs_sum"] = self.total(tf.abs(flat))
        if "min" in raw:
            found["min"] = tf.raw_ops.Min(input=flat, axis=self._axis)
        if "max" in raw:
            found["max"] = tf.raw_ops.Max(input=flat, axis=self._axis)
        if "nonzero" in raw:
            found["nonzero"] = self.count(tf.not_equal(flat, self._zero))
        if "variance" in raw:
            found["variance"] = tf.math.reduce_variance(flat)
        if "nonfinite" in raw:
            found["nonfinite"] = self.count(tf.logical_not(tf.math.is_finite(flat)))
        for name in sorted(raw):
            if (limits := limits_of(name)) is not None:
                found[name] = self.count(inside(flat, *limits))
        return found

    def examine(self, flat: Mapping[str, Any], squares: Mapping[str, Any], norms: bool = True) -> dict[str, dict[str, Any]]:
        """Counts of NaN and infinite elements of each tensor and, with ``norms``, its exact norm, but only when some sum of squares is not finite
        or too small; otherwise zeros, and -1 for the norm. One branch for all, so that healthy steps pay for one condition."""
        if not flat:
            return {}
        sums = tf.stack([squares[name] for name in flat])
        odd = tf.logical_not(tf.reduce_all(tf.math.is_finite(sums)))
        if norms:  # below 1e-30 a sum of squares of non-zero elements is rounded away
            odd = tf.logical_or(odd, tf.reduce_any(tf.less(sums, 1e-30)))
        labels = ("nan", "inf", "exact") if norms else ("nan", "inf")
        usual = tf.constant([[0.0, 0.0, -1.0][: len(labels)]] * len(flat))
        table = tf.cond(odd, lambda: _table(list(flat.values())) if norms else self._counts(list(flat.values())), lambda: usual)
        return {
            name: dict(zip(labels, tf.unstack(row, num=len(labels)), strict=True))
            for name, row in zip(flat, tf.unstack(table, num=len(flat)), strict=True)
        }

    def _counts(self, flat: list[Any]) -> Any:
        return tf.stack([tf.stack([self.count(tf.math.is_nan(part)), self.count(tf.math.is_inf(part))]) for part in flat])

    def identical(self, flat: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], first: frozenset[str]) -> dict[str, Any]:
        """1 for each matrix whose units are all equal. A unit is a slice along the last axis, for the names in ``first`` along the first one.

        Some pairs of elements chosen at random decide for nearly every tensor; only where they are equal is the whole looked at.
        """
        units = {name: shape[0 if name in first else -1] for name, shape in shapes.items() if name in flat and len(shape) >= 2}
        units = {name: count for name, count in units.items() if count >= 2}
        if not units:
            return {}
        generator, marks = np.random.default_rng(0x5EED), []
        for name, count in units.items():
            rest = int(np.prod(shapes[name], dtype=np.int64)) // count
            place, other = generator.integers(0, rest, UNIT_ROWS), generator.integers(1, count, UNIT_ROWS)
            pairs = np.stack([place, other * rest + place] if name in first else [place * count, place * count + other])
            seen = tf.gather(flat[name], pairs.astype(np.int32 if rest * count < 2**31 else np.int64), axis=self._axis)
            marks.append(self._equal(seen, self._axis))
        found = tf.stack(marks)

        def look() -> Any:
            whole = [tf.reshape(flat[name], [count, -1] if name in first else [-1, count]) for name, count in units.items()]
            return tf.stack([self._equal(table, 0 if name in first else 1) for name, table in zip(units, whole, strict=True)])

        found = tf.cast(tf.cond(tf.reduce_any(found), look, lambda: found), tf.float32)
        return dict(zip(units, tf.unstack(found, num=len(units)), strict=True))

    def _equal(self, table: Any, axis: Any) -> Any:
        same = tf.equal(tf.raw_ops.Max(input=table, axis=axis), tf.raw_ops.Min(input=table, axis=axis))
        return tf.raw_ops.All(input=same, axis=self._axis)

    def reduce_rows(self, slices: Any, numel: float, raw: frozenset[str]) -> tuple[dict[str, Any], Any]:
        """Raw numbers over the whole table of which ``slices`` holds the touched rows; the others count as 0. Also the summed rows, flat."""
        rows = self.flat(merge_rows(slices))
        found = self.reduce(rows, (raw - {"variance", "min", "max"}) | ({"sum", "square"} if "variance" in raw else frozenset()))
        if "variance" in raw:
            found["variance"] = tf.maximum(2.0 * found["square"] / numel - (found["sum"] / numel) ** 2, 0.0)
        if "min" in raw:
            found["min"] = tf.minimum(tf.reduce_min(rows), 0.0)
        if "max" in raw:
            found["max"] = tf.maximum(tf.reduce_max(rows), 0.0)
        return found, rows


def _table(flat: list[Any]) -> Any:
    """[tensors, 3]: NaN, infinite elements, L2 norm of the finite ones (inf or NaN where an element is).

    All tensors in one vector keep the graph small; very large ones are looked at one by one, since that vector is a copy.
    """
    if len(flat) > 1 and sum(tensor.shape.num_elements() or ONE_VECTOR for tensor in flat) >= ONE_VECTOR:
        return tf.concat([_table([tensor]) for tensor in flat], 0)
    whole, owner = tf.concat(flat, 0), tf.concat([tf.fill(tf.shape(part), index) for index, part in enumerate(flat)], 0)

    def total(values: Any) -> Any:
        return tf.math.unsorted_segment_sum(values, owner, len(flat))

    nan, inf = total(tf.cast(tf.math.is_nan(whole), tf.float32)), total(tf.cast(tf.math.is_inf(whole), tf.float32))
    size = tf.maximum(tf.math.unsorted_segment_max(tf.abs(whole), owner, len(flat)), 0.0)
    norm = size * tf.sqrt(total(tf.math.divide_no_nan(whole, tf.gather(size, owner)) ** 2))
    norm = tf.where(inf > 0, np.float32(np.inf), norm)
    return tf.stack([nan, inf, tf.where(nan > 0, np.float32(np.nan), norm)], 1)


def merge_rows(slices: Any) -> Any:
    """Values [n, …] of IndexedSlices with the rows of equal indices summed into one; the rows that become free are 0."""
    order = tf.argsort(slices.indices)
    indices = tf.gather(slices.indices, order)
    first = tf.concat([tf.zeros([1], tf.int32), tf.cast(tf.not_equal(indices[1:], indices[:-1]), tf.int32)], 0)
    return tf.math.unsorted_segment_sum(tf.gather(wide(slices.values), order), tf.cumsum(first), tf.shape(slices.indices)[0])


class Sketch:
    """A fixed random sample of each variable's elements, read before and after an update.

    Up to 1,024 elements, chosen by a generator of our own; of a table whose gradient touches some rows only, the first 64 of those rows,
    since the others do not move. Elements are gathered from the resource, so a large variable is not copied.
    """

    def __init__(self, variables: Mapping[str, Any], gradients: Mapping[str, Any], raw: frozenset[str] = frozenset()) -> None:
        """``raw``: which numbers beside the usual ones are wanted."""
        self.raw = raw
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
        self._slopes: dict[str, Any] = {}
        if "swallowed" in raw:  # only in half precision is a change rounded away as a rule
            halves = {name: gradients.get(name) for name, variable in variables.items() if str(variable.dtype) in ("float16", "bfloat16")}
            self._slopes = {name: slope for name, slope in halves.items() if slope is not None and not isinstance(slope, tf.IndexedSlices)}

    def compare(self) -> dict[str, dict[str, Any]]:
        """After the update: half the squared norms of the change and of the values before, the largest change, elements compared."""
        found = {}
        for name in self.variables:
            old, new = wide(self.before[name]), wide(self._pick(name))
            change = new - old
            size = tf.abs(change)
            found[name] = {"square": tf.nn.l2_loss(change), "before": tf.nn.l2_loss(old), "largest": tf.reduce_max(size)}
            if self.raw & {"close", "abs_before"}:
                earlier = tf.abs(old)
                if "close" in self.raw:
                    found[name]["close"] = tf.reduce_all(tf.less_equal(size, 1e-8 + 1e-5 * earlier))
                if "abs_before" in self.raw:
                    found[name] |= {"abs_change": tf.reduce_sum(size), "abs_before": tf.reduce_sum(earlier)}
            if name in self._slopes:
                slope = self._sample(name, wide(tap(self._slopes[name])))
                lost = tf.logical_and(tf.equal(change, 0.0), tf.not_equal(slope, 0.0))
                found[name]["swallowed"] = tf.reduce_sum(tf.cast(lost, tf.float32))
            if name not in self.counts:
                found[name]["count"] = tf.cast(tf.size(old), tf.float32)
        return found

    def _pick(self, name: str) -> Any:
        variable = self.variables[name]
        value = variable.value if hasattr(variable, "value") and not callable(variable.value) else variable
        return self._sample(name, value)

    def _sample(self, name: str, value: Any) -> Any:
        return tf.gather_nd(value, self.indices[name]) if name in self.indices else tf.identity(value)


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Create the optimizer's variables as its ``apply`` would: inside a branch of a graph that is no longer possible."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True

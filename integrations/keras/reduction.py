"""Reduces what a look has kept to one packed vector, at the end of the step on TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainvet.integrations.keras import kernels
from trainvet.integrations.keras.batches import named
from trainvet.integrations.keras.facts import running_means
from trainvet.integrations.keras.layout import Layout, needed
from trainvet.integrations.keras.look import Applied, Look
from trainvet.integrations.keras.outputs import ELEMENTS
from trainvet.integrations.keras.plan import function_of, unit_axis
from trainvet.integrations.keras.structure import kind_of
from trainvet.integrations.keras.tap import fused, tap
from trainvet.integrations.keras.units import along_batch, flat_below, softmax_numbers, spans_batch
from trainvet.statistics import Subject, limits_of

Row = dict[str, Any]


class Reduction:
    """``layout`` says what stands where in the vector that :meth:`pack` returns."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.layout = Layout()
        self.outputs: dict[str, Any] = {}
        self.batch: Any = None  # samples in the batch, where that shows
        self.reducer = kernels.Reducer()
        self._none = tf.constant(0.0)
        self._numbers: dict[str, Row] = {"optimizer": {}, "loss": {}, "run": {}}

    def pack(self, data: Any) -> Any:
        """A float32 vector of everything wanted; ``data`` is the batch as ``train_step`` was given it."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        first = next((leaf for leaf in tf.nest.flatten(x) if isinstance(leaf, tf.Tensor) and leaf.shape.rank), None)
        self.batch = None if first is None else tf.shape(first)[0]
        for part in (
            self._applied,
            self._gradients,
            self._weights,
            self._updates,
            self._buffers,
            self._outputs,
            self._activations,
            self._modules,
            lambda: self._data(data),
            self._losses,
        ):
            self.look.safely(part)
        for target, cells in self._numbers.items():
            self.layout.add(target, "value", cells, kernels.stack)
        if not self.layout.tensors:
            self.layout.add("run", "value", {"nothing": tf.zeros(())}, kernels.stack)
        return tf.concat([kernels.wide(tensor) for tensor in self.layout.tensors], 0)

    def _put(self, target: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
        for raw in sorted({raw for row in rows.values() for raw in row}):
            self.layout.add(target, raw, {name: row[raw] for name, row in rows.items() if raw in row}, kernels.stack)

    # ---- parameters

    def _applied(self) -> None:
        run = self._numbers["run"]
        for applied in self.look.applied:
            if applied.scale is not None:
                run["scale"] = applied.scale
            if applied.rate is not None:
                self._numbers["optimizer"][applied.optimizer] = applied.rate
            run[f"iterations:{applied.optimizer}"] = kernels.wide(applied.iterations[0])
            if len(applied.iterations) > 1:
                run["advanced"] = kernels.wide(applied.iterations[1] - applied.iterations[0])

    def _gradients(self) -> None:
        if not any(key.startswith("gradient.") or key == "run.gradient_norm" for key in self.look.want):
            return
        raw = needed(self.look.want, "gradient") | {"square"}
        rows: dict[str, Row] = {}
        flat: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for applied in self.look.applied:
            for name in applied.gradients:
                shape = _shape(applied.variables[name])
                self.layout.counts["gradient", name] = float(np.prod(shape))
                gradient = _unscaled(applied, name)
                if gradient is None:
                    rows[name] = {"present": self._none}
                elif isinstance(gradient, tf.IndexedSlices):
                    rows[name], flat[name] = self.reducer.reduce_rows(gradient, self.layout.counts["gradient", name], raw)
                else:
                    flat[name], shapes[name] = self.reducer.flat(gradient, int(np.prod(shape))), shape
                    rows[name] = self.reducer.reduce(flat[name], raw)
                    if "underflow" in raw and applied.scale is not None:
                        small = tf.less(tf.abs(flat[name]) * applied.scale, 2.0**-14)
                        rows[name]["underflow"] = self.reducer.count(tf.logical_and(small, tf.not_equal(flat[name], 0.0)))
        for name, extra in self.reducer.examine(flat, {name: rows[name]["square"] for name in flat}).items():
            rows[name] |= extra
        if "identical" in raw:
            tables = frozenset(name for name in shapes if self._is_table(name))
            for name, mark in self.reducer.identical(flat, shapes, tables).items():
                rows[name]["identical"] = mark
        self._put("gradient", rows)

    def _weights(self) -> None:
        raw = needed(self.look.want, "weight")
        if not raw:
            return
        variables = {name: variable for applied in self.look.applied for name, variable in applied.variables.items()}
        shapes = {name: _shape(variable) for name, variable in variables.items()}
        flat = {name: self.reducer.flat(tf.convert_to_tensor(variable)) for name, variable in variables.items()}
        rows = {name: self.reducer.reduce(values, raw | {"square"}) for name, values in flat.items()}
        for name, extra in self.reducer.examine(flat, {name: row["square"] for name, row in rows.items()}).items():
            rows[name] |= extra
        if "identical" in raw:
            tables = frozenset(name for name in variables if self._is_table(name))
            for name, mark in self.reducer.identical(flat, shapes, tables).items():
                rows[name]["identical"] = mark
        self.layout.counts |= {("weight", name): float(np.prod(shape)) for name, shape in shapes.items()}
        self._put("weight", rows)

    def _is_table(self, name: str) -> bool:
        """An embedding has a row per unit, all other kernels a column."""
        plan = self.look.plan
        home = plan.home.get(id(plan.parameters.get(name)))
        return home is not None and isinstance(home.layer, keras.layers.Embedding)

    def _updates(self) -> None:
        rows: dict[str, Row] = {}
        for applied in self.look.applied:
            for name, row in applied.updates.items():
                rows[name] = row
                if "count" not in row:
                    self.layout.counts["update", name] = min(float(np.prod(_shape(applied.variables[name]))), float(kernels.SKETCH))
        self._put("update", rows)

    def _buffers(self) -> None:
        raw = needed(self.look.want, "buffer")
        if raw:
            buffers = self.look.plan.buffers
            flat = {name: self.reducer.flat(tf.convert_to_tensor(variable)) for name, variable in buffers.items()}
            self.layout.counts |= {("buffer", name): float(np.prod(_shape(variable))) for name, variable in buffers.items()}
            self._put("buffer", {name: self.reducer.reduce(values, raw) for name, values in flat.items()})

    # ---- activations

    def _activations(self) -> None:
        raw = needed(self.look.want, "activation")
        rows: dict[str, Row] = {}
        units: dict[str, Any] = {}
        flat: dict[str, Any] = {}
        squares: dict[str, Any] = {}
        # an output that is about to be fused with what follows must not be read at all; decided before any reader of ours exists
        shown = [item for item in self.look.shown if not fused(item.tensor)]
        for index, item in enumerate(shown):
            place, tensor = item.place, kernels.wide(tap(item.tensor))
            function, rank = function_of(place.layer), int(item.tensor.shape.rank)
            values = self.reducer.flat(tensor)
            row = self._activation(tensor, values, raw, function, item.mask)
            if function == "softmax" and raw & {"entropy", "input_abs_max"}:
                row |= softmax_numbers(place.layer, tensor, item.given, raw)
            if "batch_axis" in raw and self.batch is not None and along_batch(place.layer, rank):
                row["batch_axis"] = spans_batch(tensor, self.batch)
            axis = unit_axis(place.layer, rank)
            limit = flat_below(place.layer, function)
            if "units" in raw and limit is not None and rank >= 2 and tensor.shape[axis] is not None:
                source = item.given if limit.of_input else item.tensor
                high = _highest(tensor if source is item.tensor else kernels.wide(tap(source)), axis, item.mask)
                high = high if limit.value == 0 else high - limit.value
                units[place.name] = tf.maximum(units[place.name], high) if place.name in units else high
                row["positions"] = _positions(row["count"], tensor, axis, item.mask)
            rows[place.name] = _merge(rows[place.name], row) if place.name in rows else row
            flat[f"{index}:{place.name}"], squares[f"{index}:{place.name}"] = values, row["square"]
            self.layout.subjects["activation", place.name] = self.look.plan.activation(place.name, tensor.shape.as_list(), item.tensor.dtype.name)
        if raw & {"nan", "inf"}:
            for key, extra in self.reducer.examine(flat, squares, norms=False).items():
                name = key.split(":", 1)[1]
                rows[name] = _merge(rows[name], extra)
        self._put("activation", rows)
        for name, high in units.items():
            self.layout.add_vector("activation", "units", name, high, int(high.shape[0]))

    def _activation(self, tensor: Any, flat: Any, raw: frozenset[str], function: str, mask: Any) -> Row:
        ranged = {name: limits for name in sorted(raw) if (limits := limits_of(name)) is not None}
        row = self.reducer.reduce(flat, (raw - {"nonzero", *ranged}) | {"square"})
        row["count"] = kernels.wide(tf.size(flat))
        weight = None if mask is None else tf.cast(mask, tf.float32)[..., None]
        if "constant" in raw and tensor.shape.rank:
            same = tf.reduce_all(tf.equal(tensor, tensor[:1]))
            row["constant"] = tf.logical_and(same, tf.greater(tf.shape(tensor)[0], 1))
        if "nonzero" in raw:
            row["nonzero"] = self._counted(tf.not_equal(tensor, 0.0), weight)
        if "saturated" in raw and function in kernels.SATURATED:
            low, high = kernels.SATURATED[function]
            row["saturated"] = self._counted(tf.logical_or(tf.less(tensor, low), tf.greater(tensor, high)), weight)
        for name, limits in ranged.items():
            row[name] = self._counted(kernels.inside(tensor, *limits), weight)
        if weight is not None:
            row["valid"] = tf.reduce_sum(weight) * float(tensor.shape[-1])
        return row

    def _counted(self, condition: Any, weight: Any) -> Any:
        if weight is None:
            return self.reducer.count(tf.reshape(condition, [-1]))
        return tf.reduce_sum(tf.cast(condition, tf.float32) * weight)

    # ---- modules

    def _modules(self) -> None:
        """What batch normalisations in training mode normalise over, and the range of indices that embeddings are given."""
        rows: dict[str, Row] = {}
        for name, (place, tensor) in self.look.fed.items():
            kind = kind_of(place.layer)
            if kind == "batch_norm" and "module.values" in self.look.want and self.look.wiring.training.get(name):
                channels = int(tensor.shape[place.layer.axis] or 1)
                rows[name] = {"values": kernels.wide(tf.size(tensor)) / channels, "samples": kernels.wide(tf.shape(tensor)[0])}
            elif kind == "embedding" and "module.index_max" in self.look.want:
                rows[name] = {"index_min": kernels.wide(tf.reduce_min(tensor)), "index_max": kernels.wide(tf.reduce_max(tensor))}
        self._put("module", rows)

    # ---- data and loss

    def _outputs(self) -> None:
        """Predictions leave the step as they are, of large ones the first samples: the host reduces them."""
        if not any(key.startswith("output.") for key in self.look.want) or not self.look.calls:
            return
        for name, tensor in named(self.look.calls[0].predictions, "output").items():
            if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating or fused(tensor):
                continue
            self._subject("output", name, tensor)
            rank, sizes = tensor.shape.rank, tensor.shape.as_list() if tensor.shape.rank else []
            each = int(np.prod([size or 1 for size in sizes[1:]], dtype=np.int64))
            seen = tap(tensor)
            self.outputs[name] = seen[: max(1, ELEMENTS // each)] if rank and None not in sizes[1:] else seen

    def _subject(self, target: str, name: str, tensor: Any) -> None:
        shape = tuple(int(size or 0) for size in tensor.shape.as_list()) if tensor.shape.rank is not None else ()
        self.layout.subjects[target, name] = Subject(name, target, shape=shape, dtype=tensor.dtype.name, trainable=False)

    def _data(self, data: Any) -> None:
        """Subjects for inputs and labels; the host measures them. Labels that the user's step made are measured here."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        calls = self.look.calls
        raw = needed(self.look.want, "label") if calls and not self.look.own_labels else frozenset()
        rows: dict[str, Row] = {}
        flat: dict[str, Any] = {}
        for target, value in (("input", x), ("label", calls[0].labels if calls else y)):
            for name, tensor in named(value, target).items():
                if not isinstance(tensor, tf.Tensor) or not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
                    continue
                self._subject(target, name, tensor)
                if target != "label" or not raw:
                    continue
                numbers = self.reducer.flat(tensor)
                rows[name] = self.reducer.reduce(numbers, raw | {"square"})
                samples = tf.shape(tensor)[0] if tensor.shape.rank else tf.constant(1)
                rows[name] |= {"count": kernels.wide(tf.size(numbers)), "samples": kernels.wide(samples)}
                if tensor.dtype.is_floating:
                    flat[name] = numbers
        for name, extra in self.reducer.examine(flat, {name: rows[name]["square"] for name in flat}, norms=False).items():
            rows[name] |= extra
        self._put("label", rows)
        if self.batch is not None:
            self._numbers["run"]["batch"] = kernels.wide(self.batch)

    def _losses(self) -> None:
        for index, call in enumerate(self.look.calls):
            value = tap(tf.convert_to_tensor(call.value))
            self._numbers["loss"]["loss" if index == 0 else f"loss#{index}"] = tf.reduce_mean(kernels.wide(value))
        for name, metric in running_means(self.look.plan.model).items():
            self._numbers["run"][f"count:{name}"] = kernels.wide(tf.convert_to_tensor(metric.count))


def _unscaled(applied: Applied, name: str) -> Any:
    """The gradient of the update in float32: without the loss scale, averaged with what earlier batches had accumulated."""
    gradient = applied.gradients[name]
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = kernels.wide(tap(gradient.values))
        values = values if applied.scale is None else values / applied.scale
        gradient = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient if name not in applied.held else (tf.convert_to_tensor(gradient) + applied.held[name]) / applied.batches
    gradient = kernels.wide(tap(gradient))
    gradient = gradient if applied.scale is None else gradient / applied.scale
    return gradient if name not in applied.held else (gradient + applied.held[name]) / applied.batches


def _highest(tensor: Any, axis: int, mask: Any) -> Any:
    """The maximum of each unit [units] over everything that is not masked."""
    seen = tensor if mask is None else tf.where(mask[..., None], tensor, tf.fill(tf.shape(tensor), -float("inf")))
    return tf.reduce_max(seen, axis=[other for other in range(int(tensor.shape.rank)) if other != axis])


def _positions(count: Any, tensor: Any, axis: int, mask: Any) -> Any:
    return count / float(tensor.shape[axis]) if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _merge(first: Row, second: Row) -> Row:
    """Two calls of one layer."""
    joined = dict(first)
    for raw, value in second.items():
        known = joined.get(raw)
        if known is None:
            joined[raw] = value
        elif raw == "min":
            joined[raw] = tf.minimum(known, value)
        elif raw in ("max", "variance", "constant", "input_abs_max", "batch_axis"):
            joined[raw] = tf.maximum(kernels.wide(known), kernels.wide(value))
        else:
            joined[raw] = known + value
    return joined


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in variable.shape)

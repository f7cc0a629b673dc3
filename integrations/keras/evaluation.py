"""The validation within ``fit``: its first samples, and the mode its layers are called in. Nothing is run twice, and no batch is taken.

Keras keeps the validation's arrays in an adapter: their first rows are read from there. Validation data of other kinds (a dataset, a generator)
could only be looked at by taking batches from it, so it is left alone. The layers are watched while Keras itself traces ``test_function``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from trainvet.integrations.keras.batches import measure, named
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.shadow import Shadows
from trainvet.integrations.keras.structure import kind_of, mode_of
from trainvet.statistics import Table

BATCHES = 8
INPUT = frozenset({"mean", "std", "min", "max"})
OTHER = "validation data that are not arrays can only be looked at by taking batches from them"


class Evaluation:
    """Watches the validations of one fit. ``failed`` is called while an error of ours is handled."""

    def __init__(self, model: Any, failed: Callable[[str], None]) -> None:
        self.model = model
        self.failed = failed
        self.modes: dict[str, float] = {}
        self._watched: Any = None
        self._original: Any = None
        self._plan: Plan | None = None

    def begin(self, plan: Plan) -> None:
        """A validation begins; Keras has made ``model.test_function``, which it reads again at each batch."""
        function = vars(self.model).get("test_function")
        if function is None or function is self._watched or isinstance(getattr(function, "__self__", None), Evaluation):
            return
        self._original, self._plan = function, plan
        vars(self.model)["test_function"] = self._first

    def end(self) -> None:
        """Nothing of ours stands in front of the user's function."""
        function = vars(self.model).get("test_function")
        if getattr(function, "__self__", None) is self:
            vars(self.model)["test_function"] = self._original

    def _first(self, iterator: Any) -> Any:
        """The first batch: the layers are watched while it is traced or run."""
        self.end()
        modes: dict[str, float] = {}
        with Shadows() as shadows:
            try:
                for place in self._plan.places if self._plan is not None else ():
                    if place.leaf and place.name:
                        shadows.put(place.layer, "call", _noting(place.name, place.layer, modes))
            except Exception:
                shadows.remove()
                self.failed("watching a validation")
            logs = self._original(iterator)
        self._watched = self._original
        self.modes = modes or self.modes
        return logs

    def tables(self, plan: Plan, updates: Mapping[str, int], settled: bool, want: frozenset[str]) -> dict[str, Table]:
        """validation_input and validation_module. ``updates``: training steps of each batch normalisation; ``settled``: its statistics are not
        those of a fresh model."""
        tables: dict[str, Table] = {}
        if any(key.startswith("validation_input.") for key in want):
            rows = {name: measure(array, INPUT) for name, array in self._inputs()}
            keys = [key for key in ("mean", "std", "min", "max", "count") if f"validation_input.{key}" in want]
            if rows:
                tables["validation_input"] = Table(tuple(rows), {key: np.array([row.get(key, np.nan) for row in rows.values()]) for key in keys})
        if self.modes and any(key.startswith("validation_module.") for key in want):
            layers = {place.name: place.layer for place in plan.places}
            names = tuple(name for name in self.modes if name in layers)
            left = [0.0 if self.modes[name] or settled else unsettled(layers[name], updates.get(name, 0)) for name in names]
            columns = {"training": np.array([self.modes[name] for name in names]), "unsettled": np.array(left)}
            tables["validation_module"] = Table(names, {key: column for key, column in columns.items() if f"validation_module.{key}" in want})
        return tables

    def unseen(self) -> dict[str, str]:
        """Why the validation's inputs do not show, where they do not."""
        iterator = vars(self.model).get("_eval_epoch_iterator")
        return {"validation_input": OTHER} if iterator is not None and _arrays(iterator) is None else {}

    def _inputs(self) -> Iterator[tuple[str, Any]]:
        found = _arrays(vars(self.model).get("_eval_epoch_iterator"))
        if found is None:
            return
        inputs, size = found
        x, _, _ = keras.utils.unpack_x_y_sample_weight(inputs)
        for name, leaf in named(x, "input").items():
            array = np.asarray(leaf[: BATCHES * size])
            if array.dtype.kind in "fiu" and array.size:
                yield name, array


def unsettled(layer: Any, updates: int) -> float:
    """Share of the initial running statistics that is left in a batch normalisation after ``updates`` training steps; 0 for other layers."""
    if kind_of(layer) != "batch_norm" or not layer.trainable:
        return 0.0
    return float(layer.momentum) ** updates


def array_adapter(iterator: Any) -> Any:
    """The adapter of an epoch iterator of Keras that reads arrays; None for other data."""
    adapter = getattr(iterator, "data_adapter", None)
    return adapter if type(adapter).__name__ == "ArrayDataAdapter" else None


def _arrays(iterator: Any) -> tuple[Any, int] | None:
    adapter = array_adapter(iterator)
    inputs, size = getattr(adapter, "_inputs", None), getattr(adapter, "_batch_size", None)
    return (inputs, int(size)) if inputs is not None and size else None


def _noting(name: str, layer: Any, modes: dict[str, float]) -> Callable[..., Any]:
    call = layer.call

    def noted(*args: Any, **kwargs: Any) -> Any:
        mode = mode_of(layer, kwargs)
        if mode is not None:
            modes[name] = float(mode)
        return call(*args, **kwargs)

    return noted

"""What is measured of a step on the host: inputs, labels, predictions and modules; and what cannot be had of Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainvet.integrations.keras import outputs
from trainvet.integrations.keras.backend import Outcome
from trainvet.integrations.keras.batches import CLASSES, Batches, Target
from trainvet.integrations.keras.facts import Traits
from trainvet.integrations.keras.layout import Reading
from trainvet.integrations.keras.objectives import by_class, targets_of
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.structure import describe_layers, shared, subjects
from trainvet.monitor import Monitor
from trainvet.statistics import Layer, Subject, Table, Vector

NEVER = {
    "update.moment_ratio": "the optimizer's second moments are not read in Keras",
    "run.stale_gradient": "Keras empties its gradients itself",
    "run.noise_scale": "micro-batches do not show one by one in Keras",
    "run.replica_difference": "several replicas are not observed",
    "run.other_weights": "evaluate and predict are not observed after fit",
}
CLIPPING = {"": "no clipping in the optimizer", "value": "clipping by value has no one scale"}


class Host:
    """Tables that do not, or not only, come from the packed vector. ``statistics``: what is read, by target."""

    def __init__(self, model: Any, statistics: Mapping[str, Sequence[str]], monitor: Monitor) -> None:
        self.model, self.statistics, self.monitor = model, statistics, monitor
        self.layers: tuple[Layer, ...] = ()
        self.shared: tuple[str, ...] = ()
        self.modules: tuple[Subject, ...] = ()
        self._batches = Batches(statistics)
        self._traits = Traits()
        self._targets: dict[str, Target] = {}
        self._by_class: dict[str, bool] = {}
        self._buffers: tuple[tuple[str, ...], Vector] | None = None
        self._faulty = False

    def learn(self, plan: Plan, traits: Traits) -> None:
        """What the traced step shows of the layers and of what the losses are given."""
        self._traits = traits
        try:
            self._targets, self._by_class = targets_of(self.model, traits), by_class(self.model, traits)
            self.modules = tuple(subjects(plan, traits.called))
            self.layers, self.shared = describe_layers(plan, traits.after), shared(plan)
        except Exception:  # a layer of another kind than we know costs these facts, not the measuring
            self.monitor.failed("the layers could not be described")

    def take_over(self, earlier: Host) -> None:
        """Go on with what an earlier fit of the model has seen."""
        self.layers, self.shared, self.modules = earlier.layers, earlier.shared, earlier.modules
        self._batches, self._traits = earlier._batches, earlier._traits
        self._targets, self._by_class, self._buffers = earlier._targets, earlier._by_class, earlier._buffers

    def tables(self, batch: Any, outcome: Outcome, reading: Reading) -> dict[str, Table]:
        """Inputs, labels, predictions and modules. A fault of ours costs these numbers only."""
        found: dict[str, Table] = {}
        try:
            if self.statistics["input"] or self.statistics["label"]:
                padded = frozenset(name for name, (_, padding) in self._traits.embedded.items() if padding)
                found |= self._batches.tables(batch, self._targets if self._traits.own_labels else None, padded)
            if outcome.outputs:
                arrays = {name: np.asarray(tensor) for name, tensor in outcome.outputs.items()}
                whole = {name: array.ndim == 0 or len(array) == reading.number("run", "batch") for name, array in arrays.items()}
                table = outputs.table(arrays, whole, self._by_class, frozenset(self.statistics["output"]))
                found |= {"output": table} if table is not None else {}
            if self.statistics["module"] and self._traits.called:
                found["module"] = self._module_table(reading)
        except Exception:
            if not self._faulty:
                self.monitor.failed("a batch could not be measured")
            self._faulty = True
        return found

    def _module_table(self, reading: Reading) -> Table:
        names = tuple(self._traits.called)
        columns = {"called": np.array([float(count) for count in self._traits.called.values()])}
        columns["training"] = np.array([self._traits.training.get(name, np.nan) for name in names])
        raw, rows = reading.raw.get("module", {}), {name: row for row, name in enumerate(reading.layout.names.get("module", ()))}
        for key in ("values", "samples", "index_min", "index_max"):
            if key in raw and (key != "samples" or "values" in raw):
                column = np.where(np.isnan(raw["values"]), np.nan, raw[key]) if key == "samples" else raw[key]
                columns[key] = np.array([column[rows[name]] if name in rows else np.nan for name in names])
        return Table(names, {key: column for key, column in columns.items() if key in self.statistics["module"]})

    def compare_buffers(self, reading: Reading) -> None:
        """A buffer changed where its sum or its sum of squares did."""
        names, raw = reading.layout.names["buffer"], reading.raw["buffer"]
        if "sum" not in raw or "square" not in raw:
            return
        marks = np.stack([raw["sum"], raw["square"]])
        before, self._buffers = self._buffers, (names, marks)
        same = before is None or before[0] != names
        changed = np.zeros(len(names)) if same or before is None else (marks != before[1]).any(0).astype(np.float64)
        reading.set("buffer", "changed", dict(zip(names, changed.tolist(), strict=True)))


def unseen(plan: Plan, traits: Traits, clipping_by: str, scaled: bool) -> dict[str, str]:
    """What cannot be had of Keras, or not in this run, and why."""
    hidden = {} if clipping_by in ("norm", "each") else {"run.clip_scale": CLIPPING["value" if clipping_by else ""]}
    if not scaled:
        hidden["gradient.underflow_share"] = "no loss scaler in use"
    if not any(str(variable.dtype) in ("float16", "bfloat16") for variable in plan.parameters.values()) and plan.built:
        hidden["update.swallowed_share"] = "no parameter is kept in half precision"
    if not any(type(place.layer).__name__ == "Softmax" for place in plan.places):
        hidden["activation.batch_axis"] = "only a keras.layers.Softmax shows the axis it runs along"
    if traits.calls and not traits.own_labels:
        own = "the user's own training step makes the labels"
        hidden |= {f"label.{name}": own for name in (*sorted(CLASSES), "out_of_range", "pairs", "contradictions")}
    return NEVER | hidden


def clip_scale(norms: Vector, limit: float | None, how: str) -> float | None:
    """Norm of the gradients after the optimizer's clipping over the norm before; None where it does not follow from the norms [parameters]."""
    whole = float(np.linalg.norm(norms))
    if limit is None or how not in ("norm", "each") or not np.isfinite(whole):
        return None
    after = min(whole, limit) if how == "norm" else float(np.linalg.norm(np.minimum(norms, limit)))
    return after / whole if whole > 0 else 1.0

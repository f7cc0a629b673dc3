"""The vocabulary: every statistic's name, unit and meaning; what a probe hands over (Snapshot) and says once (Facts).

A statistic is named ``target.name``; the same key is used in a rule's ``reads``, in ``Watchpoint``, in ``history`` and as
the column in TensorBoard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

TARGETS = ("gradient", "weight", "update", "activation", "buffer", "input", "label", "loss", "optimizer", "run")
PARAMETER_TARGETS = ("gradient", "weight", "update")

MEANING: dict[str, str] = {
    # gradients: unscaled, per optimizer step, before clipping
    "gradient.norm": "L2 norm over the elements",
    "gradient.present": "1 where the step produced a gradient, 0 where it was None (all other numbers are then 0)",
    "gradient.rms": "root mean square over the elements",
    "gradient.mean": "mean",
    "gradient.abs_mean": "mean of absolute values",
    "gradient.std": "standard deviation (population)",
    "gradient.abs_max": "largest absolute value",
    "gradient.min": "smallest value",
    "gradient.max": "largest value",
    "gradient.zero_share": "share of elements that are exactly 0",
    "gradient.nan": "number of NaN elements",
    "gradient.inf": "number of infinite elements",
    "gradient.identical_rows": "1 where all rows (first dimension) are equal and not all zero",
    # weights: after the update of the step
    "weight.norm": "L2 norm over the elements",
    "weight.rms": "root mean square over the elements",
    "weight.mean": "mean",
    "weight.abs_mean": "mean of absolute values",
    "weight.std": "standard deviation (population)",
    "weight.abs_max": "largest absolute value",
    "weight.min": "smallest value",
    "weight.max": "largest value",
    "weight.zero_share": "share of elements that are exactly 0",
    "weight.nan": "number of NaN elements",
    "weight.inf": "number of infinite elements",
    "weight.identical_rows": "1 where all rows (first dimension) are equal",
    # updates: weight after minus weight before the optimizer step, from a fixed random sample of elements
    "update.ratio": "norm of the update over the norm of the weight before it, both over the same sample of elements",
    "update.rms": "root mean square of the update",
    "update.unchanged": "1 where no sampled element changed",
    # activations: module or function outputs of the training forward
    "activation.mean": "mean",
    "activation.std": "standard deviation (population)",
    "activation.rms": "root mean square",
    "activation.abs_max": "largest absolute value",
    "activation.min": "smallest value",
    "activation.max": "largest value",
    "activation.zero_share": "share of elements that are exactly 0 in this batch",
    "activation.nan": "number of NaN elements",
    "activation.inf": "number of infinite elements",
    "activation.dead_share": "share of units that were never above 0 in the current window of samples",
    "activation.saturated_share": "share of elements whose slope is below 5 % of its maximum (sigmoid, tanh)",
    "activation.positions": "positions per unit seen in the current window (batch times other dimensions)",
    "activation.batches": "sampled batches in the current window",
    # buffers
    "buffer.nonfinite": "number of NaN or infinite elements",
    "buffer.abs_max": "largest absolute value",
    # inputs and labels, first tensor dimension = batch
    "input.mean": "mean",
    "input.std": "standard deviation (population)",
    "input.min": "smallest value",
    "input.max": "largest value",
    "input.nan": "number of NaN elements",
    "input.inf": "number of infinite elements",
    "label.mean": "mean",
    "label.std": "standard deviation (population)",
    "label.min": "smallest value",
    "label.max": "largest value",
    "label.mean_square": "mean of squares",
    "label.count": "number of samples",
    "label.nan": "number of NaN elements",
    "label.inf": "number of infinite elements",
    # every step (series); in Keras the gradient norm only on sampled steps
    "loss.value": "the loss that is minimised, as the user wrote it (not divided by accumulation steps)",
    "optimizer.learning_rate": "learning rate of a parameter group",
    "run.gradient_norm": "L2 norm over all gradients of the step, unscaled, before clipping",
    "run.loss_scale": "the loss scale in force during the step",
    "run.skipped": "1 where the optimizer step was skipped (loss scaler, or our guard)",
}


@dataclasses.dataclass(frozen=True)
class Track:
    """One every-step quantity since the last snapshot: steps [T], applied [T], values [T] float64, T >= 1."""

    steps: Steps
    applied: Steps
    values: Vector


@dataclasses.dataclass(frozen=True)
class Table:
    """Statistics of one target at one step: names [S] and for each statistic a float64 vector [S].

    A statistic that was not measured is absent from ``columns``; NaN in a column means NaN.
    """

    names: tuple[str, ...]
    columns: Mapping[str, Vector]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a probe hands over: the step it ends at, full statistics if this step was sampled, and the series since the last one.

    ``step`` counts optimizer-step attempts from 0 and grows strictly from snapshot to snapshot; ``applied`` is the number of
    attempts up to and including this one that changed weights; ``batch`` and ``epoch`` are the trainer's own, 0-based.
    ``tables`` is empty when only series are handed over. ``urgent`` marks a snapshot sent early because a value was non-finite.
    """

    step: int
    applied: int
    batch: int = 0
    epoch: int = 0
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    series: Mapping[str, Mapping[str, Track]] = dataclasses.field(default_factory=dict)
    urgent: bool = False

    def column(self, key: str) -> tuple[tuple[str, ...], Vector] | None:
        """Names and float64 vector [S] of a sampled statistic such as "gradient.norm"; None where it was not measured."""
        target, statistic = key.split(".", 1)
        table = self.tables.get(target)
        if table is None or statistic not in table.columns:
            return None
        return table.names, table.columns[statistic]

    def values(self, key: str, names: tuple[str, ...]) -> Vector:
        """A sampled statistic for ``names``, float64 [S]; NaN where it was not measured."""
        column = self.column(key)
        if column is None:
            return np.full(len(names), np.nan)
        if column[0] == names:
            return column[1]
        known = dict(zip(column[0], column[1].tolist(), strict=True))
        return np.array([known.get(name, np.nan) for name in names], dtype=np.float64)

    def tracks(self, key: str) -> Mapping[str, Track]:
        """Every-step series of ``key`` by subject name ("loss.value" -> {"loss": Track}); empty where there is none."""
        return self.series.get(key, {})

    def keys(self) -> Iterator[str]:
        """Every statistic this snapshot holds."""
        for target, table in self.tables.items():
            for statistic in table.columns:
                yield f"{target}.{statistic}"
        yield from (key for key, tracks in self.series.items() if tracks)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One thing that is measured: a parameter, buffer, activation, input or label.

    ``depth`` is its place in the traced forward (0 = nearest the input; -1 unknown); ``module`` the dotted module path;
    ``role`` what an exemption needs to know: "bias", "norm", "embedding", "bias-before-norm", "gate", "output", or "".
    ``function`` is the activation function ("relu", "sigmoid", …) for activations. ``unit_axis`` is informative only.
    """

    name: str
    kind: str
    module: str = ""
    module_type: str = ""
    depth: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    trainable: bool = True
    group: str = ""
    tied_to: str = ""
    role: str = ""
    function: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def is_matrix(self) -> bool:
        """A trainable tensor with at least two dimensions."""
        return self.trainable and len(self.shape) >= 2


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer as the rules need it. ``family`` is "adam" (divides by a running RMS), "sgd" or "other"."""

    name: str
    type: str = ""
    family: str = "other"
    epsilon: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    unknown_parameters: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule simulated to the end of the run.

    ``curve`` holds the learning rate at each planned optimizer step of one parameter group (float64 [planned steps]).
    ``horizon`` is the number of optimizer steps after which the schedule, driven as it is configured, would be through
    (None where it has no end); ``restarts`` marks periodic schedules, ``reactive`` those that follow a metric.
    """

    group: str
    type: str
    interval: str
    curve: Vector
    horizon: float | None = None
    restarts: bool = False
    reactive: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss as it was observed: ``kind`` is "cross_entropy", "binary_cross_entropy", "regression" (squared error) or "unknown"."""

    name: str
    kind: str = "unknown"
    classes: int = 0
    samples: int = 0
    reduction: str = "mean"
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about the run before numbers arrive; handed to every rule's ``begin``, again when the plan changes."""

    framework: str = ""
    subjects: tuple[Subject, ...] = ()
    planned_steps: int | None = None
    optimizers: tuple[Optimizer, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    losses: tuple[Loss, ...] = ()
    precision: str = "32"
    loss_scaler: bool = False
    growth_interval: int = 0
    clipping: float = 0.0
    accumulation: int = 1
    manual_optimization: bool = False
    every_step: bool = True
    resumed: bool = False
    pretrained: bool = False
    profile: str = ""
    unobservable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hyper_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Subject]:
        """Subjects of one kind ("parameter", "activation", "buffer", "input", "label") by name."""
        return {subject.name: subject for subject in self.subjects if subject.kind == kind}

    @functools.cached_property
    def parameters(self) -> dict[str, Subject]:
        """Parameters by name."""
        return self.of("parameter")

    @functools.cached_property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that some optimizer holds."""
        return frozenset(name for optimizer in self.optimizers for name in optimizer.parameters)

    def upstream_first(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names`` by their subjects' place in the forward pass; unknown places last, in the order given."""
        depth = {subject.name: subject.depth for subject in self.subjects if subject.depth >= 0}
        last = max(depth.values(), default=0) + 1
        return tuple(sorted(names, key=lambda name: depth.get(name, last)))

    def why_not(self, reads: Iterable[str]) -> str:
        """Why something in ``reads`` cannot be observed here; empty when nothing is known to stand in the way."""
        for key in reads:
            reason = self.unobservable.get(key) or self.unobservable.get(key.split(".", 1)[0])
            if reason:
                return reason
        return ""


def kind_of(target: str) -> str:
    """The kind of subject a target's rows stand for: gradients, weights and updates all belong to parameters."""
    return "parameter" if target in PARAMETER_TARGETS else target

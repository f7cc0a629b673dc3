"""What a probe hands over (Snapshot) and says once (Facts). The names of statistics are in :mod:`trainvet.meaning`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvet.meaning import EVALUATION_TARGETS as EVALUATION_TARGETS
from trainvet.meaning import MEANING as MEANING
from trainvet.meaning import PARAMETER_TARGETS as PARAMETER_TARGETS
from trainvet.meaning import SERIES_TARGETS as SERIES_TARGETS
from trainvet.meaning import TARGETS as TARGETS
from trainvet.meaning import is_known as is_known
from trainvet.meaning import limits_of as limits_of
from trainvet.meaning import shares as shares

Vector = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


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

    ``step`` counts optimizer-step attempts from 0 and grows from snapshot to snapshot; what an evaluation measured between two steps
    (validation_input, validation_module, metric) comes in a snapshot of its own with the step before it. ``applied`` is the number of
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

    @property
    def sampled(self) -> bool:
        """Does it hold the full statistics of a training step? Tables of an evaluation alone are none."""
        return any(target not in EVALUATION_TARGETS for target in self.tables)

    @property
    def aside(self) -> bool:
        """Is it of an evaluation: nothing in it belongs to a training step?"""
        held = [*self.tables, *(key.partition(".")[0] for key in self.series)]
        return bool(held) and all(target in EVALUATION_TARGETS or target == "metric" for target in held)

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
    """One thing that is measured: a parameter, buffer, activation, input, label, output or module.

    ``depth`` is its place in the traced forward (0 = nearest the input; -1 unknown); ``module`` the dotted module path;
    ``role`` what an exemption needs to know: "bias", "norm", "embedding", "bias-before-norm", "gate", "attention" (a softmax that weighs
    values), "output", or "".
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
    """An optimizer as the rules need it. ``family`` is "adam" (divides by a running RMS), "sgd" or "other".

    ``decayed`` names the parameters under weight decay, ``weight_decay`` is the largest; ``coupled_decay``: it is added to the gradient (L2)
    instead of taken from the weight.
    """

    name: str
    type: str = ""
    family: str = "other"
    epsilon: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    decayed: tuple[str, ...] = ()
    coupled_decay: bool = False
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
    """The loss as it was observed: ``kind`` is "cross_entropy", "binary_cross_entropy", "regression" (squared error) or "unknown".

    ``expects`` says what the loss function wants to be given: "logits", "log_probabilities", "probabilities", "values" or "" (unknown).
    ``output_function`` is what made the prediction: the last activation ("softmax", "log_softmax", "sigmoid", "relu", "tanh", …), "linear"
    for a linear or convolution layer, "" where it is not known; ``output_axis`` the axis of a softmax, counted from 0 (-1: not known),
    ``output_layer`` the layer it came from. ``label`` and ``output`` are the subjects that hold labels and predictions.
    """

    name: str
    kind: str = "unknown"
    classes: int = 0
    samples: int = 0
    reduction: str = "mean"
    weighted: bool = False
    smoothed: bool = False
    function: str = ""
    expects: str = ""
    output_function: str = ""
    output_axis: int = -1
    output_layer: str = ""
    label: str = "label"
    output: str = "output"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module as the traced forward (Keras: the layer graph) shows it; ``name`` is its dotted path, as in the table "module".

    ``kind``: "linear", "convolution", "recurrent", "attention", "embedding", "batch_norm", "norm", "dropout", "activation", "pooling" or
    "other"; ``function`` the activation it applies ("" none, a Dense layer with ``activation="relu"`` has "relu"). ``width_in`` and
    ``width_out`` are features or channels (embedding: rows of the table and width), ``rate`` a dropout rate, ``momentum`` the share of the
    running statistics that one update of a batch normalisation keeps. ``after`` names the layers whose output it is given, through nothing
    but reshaping; () where that is not known or something else lies between. ``trainable``: it owns parameters that train, ``owns``: any.
    """

    name: str
    type: str = ""
    kind: str = "other"
    function: str = ""
    depth: int = -1
    bias: bool = False
    width_in: int = 0
    width_out: int = 0
    rate: float = 0.0
    momentum: float = 0.0
    owns: bool = False
    trainable: bool = False
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Severance:
    """An operation that ends the gradient: what ("detach", "round", "argmax", …), in which module, on which source line, and the trainable
    parameters that no other path connects to the loss."""

    operation: str
    module: str = ""
    source: str = ""
    parameters: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about the run before numbers arrive; handed to every rule's ``begin``, again when the plan changes.

    ``clipping`` is the trainer's or optimizer's threshold (None: none is known of, 0 would stop the training), ``clipping_by`` "norm" (all
    gradients together), "each" (norm of one gradient) or "value". ``disconnected`` names trainable parameters without a path to the loss in the
    autograd graph (exact, from a traced step). ``initial`` names frozen modules that still hold the random weights they were built with.
    ``shared_modules`` lists modules called at several paths as "a = b", ``broken_ties`` declared ties whose storages differ, likewise. ``autocast``
    is the dtype autocast was seen to use. ``finetuning``: the user's own freezing is known of (a finetuning callback). ``repeats_batches``: the
    same batches are wanted again and again (overfit_batches). ``balanced``: a sampler, class weights or sample weights are in use. ``seeded``,
    ``deterministic``, ``shuffled``: None where unknown. ``expect`` is the user's.
    """

    framework: str = ""
    subjects: tuple[Subject, ...] = ()
    planned_steps: int | None = None
    optimizers: tuple[Optimizer, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    losses: tuple[Loss, ...] = ()
    precision: str = "32"
    loss_scaler: bool = False
    growth_interval: int = 0
    clipping: float | None = None
    clipping_by: str = ""
    accumulation: int = 1
    manual_optimization: bool = False
    every_step: bool = True
    resumed: bool = False
    pretrained: bool = False
    profile: str = ""
    layers: tuple[Layer, ...] = ()
    severed: tuple[Severance, ...] = ()
    disconnected: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()
    shared_modules: tuple[str, ...] = ()
    broken_ties: tuple[str, ...] = ()
    autocast: str = ""
    finetuning: bool = False
    batches_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    repeats_batches: bool = False
    shuffled: bool | None = None
    balanced: bool = False
    augmented: bool = False
    seeded: bool | None = None
    deterministic: bool | None = None
    processes: int = 1
    expect: Mapping[str, float] = dataclasses.field(default_factory=dict)
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

    def loss(self, name: str) -> Loss:
        """The loss of that name; one of unknown kind where it was not seen yet."""
        return next((loss for loss in self.losses if loss.name == name), Loss(name))

    def loss_of_label(self, name: str) -> Loss:
        """The loss that label goes into; the only one there is where none names it."""
        return next((loss for loss in self.losses if loss.label == name), self.losses[0] if len(self.losses) == 1 else Loss(name))

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
    """The kind of subject a target's rows stand for: gradients, weights and updates all belong to parameters, and an evaluation sees the inputs
    and modules of the training once more."""
    return "parameter" if target in PARAMETER_TARGETS else target.removeprefix("validation_")

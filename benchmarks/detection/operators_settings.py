"""Faults in settings and in data: the same for every framework."""

from __future__ import annotations

import numpy as np

from benchmarks.detection.operators import RUNAWAY, STANDSTILL, Catalogue
from benchmarks.detection.setup import Setup

SHARED = Catalogue()
ADAPTIVE = ("adam", "adamw", "rmsprop", "adagrad")
CHANCE = 7  # seeds what a fault draws


def plain(setup: Setup) -> bool:
    """A loss of outputs and targets that the recipe itself computes."""
    return setup.loss is None and setup.criterion is not None


def labelled(setup: Setup) -> bool:
    """One class per sample."""
    return setup.kind == "classes"


def sgd(setup: Setup) -> bool:
    """Plain gradient descent: the step grows with the gradient."""
    return setup.optimizer in ("sgd", "nesterov")


@SHARED.add(RUNAWAY, "learning rate", "rate")
def rate_too_high(setup):
    setup.rate *= 300 if setup.optimizer in ADAPTIVE else 100


@SHARED.add(RUNAWAY, "learning rate", "rate")
def rate_thirty_times_too_high(setup):
    setup.rate *= 30


@SHARED.add(STANDSTILL, "learning rate", "rate")
def rate_too_low(setup):
    setup.rate *= 1e-4


@SHARED.add({"LR101"}, "learning rate", "rate", structural=True)
def rate_zero(setup):
    setup.rate = 0.0
    setup.schedule = None


@SHARED.add(RUNAWAY, "learning rate", "jump", lambda setup: setup.schedule is None and setup.accumulate == 1, structural=True)
def rate_jumps(setup):
    setup.start = setup.steps // 2
    setup.jump = (setup.start, 100.0)


@SHARED.add(RUNAWAY, "momentum|learning rate", "momentum", lambda setup: sgd(setup) and setup.momentum > 0)
def momentum_too_high(setup):
    setup.momentum = 0.999


@SHARED.add({"LR105", "WT109", "WT105"}, "decay", "decay", lambda setup: setup.optimizer in ("sgd", "nesterov", "adamw"))
def decay_too_strong(setup):
    setup.decay = 0.05 / setup.rate


@SHARED.add({"GR105", "WT106", "LR105", "GR102"}, "clip", "clip", sgd)
def clipping_too_small(setup):
    setup.clip = 1e-5


@SHARED.add(
    {"LO104", "LO107", "IN110", "FT102", "FT101"}, "label|target", "labels", lambda setup: setup.kind in ("classes", "tokens", "binary", "values")
)
def labels_shuffled(setup):
    order = np.random.default_rng(CHANCE).permutation(len(setup.y))
    setup.y = setup.y[order]
    if setup.loss is not None:  # the model makes its labels from its inputs: shuffled letters then
        setup.x = tuple(np.random.default_rng(CHANCE).permuted(value, axis=1) for value in setup.x)


@SHARED.add({"IN103"}, "label|target|class", "labels", lambda setup: labelled(setup) and plain(setup), structural=True)
def labels_from_one(setup):
    setup.y, setup.val_y = setup.y + 1, setup.val_y + 1


@SHARED.add({"IN104"}, "label|class|target", "balance", lambda setup: labelled(setup) and plain(setup))
def one_class_dominates(setup):
    keep = np.random.default_rng(CHANCE).random(len(setup.y)) < 0.01
    rows = np.flatnonzero((setup.y == 0) | keep)
    rows = np.resize(rows, len(setup.y))
    setup.x, setup.y = tuple(value[rows] for value in setup.x), setup.y[rows]


@SHARED.add({"IN105"}, "label|shuffl|order", "shuffle", labelled)
def sorted_and_unshuffled(setup):
    order = np.argsort(setup.y, kind="stable")
    setup.x, setup.y, setup.shuffle = tuple(value[order] for value in setup.x), setup.y[order], False


INPUT = {"IN102", "LO108", "WT108", "WT104", "GR101"}


def measured(setup: Setup) -> bool:
    """Inputs are measurements, and are not the targets too."""
    return setup.floating and setup.kind in ("classes", "binary", "values")


@SHARED.add(INPUT, "input|normalis", "inputs", measured)
def raw_inputs(setup):
    image = bool(setup.x[0].min() >= 0)
    scale = (lambda value: value * 255) if image else (lambda value: value * 300 + 1000)
    setup.x, setup.val_x = tuple(map(scale, setup.x)), tuple(map(scale, setup.val_x))


@SHARED.add({"IN106"}, "validation|input", "validation", measured)
def validation_not_normalised(setup):
    image = bool(setup.x[0].min() >= 0)
    setup.val_x = tuple(value * 16 if image else value * 20 + 50 for value in setup.val_x)


@SHARED.add({"NF101", "IN101"}, "input", "rows", lambda setup: setup.floating, structural=True)
def missing_value_in_one_row(setup):
    row = len(setup.y) // 2
    setup.x = tuple(value.copy() for value in setup.x)
    setup.x[0][row].reshape(-1)[3] = np.nan
    if setup.kind == "images":
        setup.y = setup.x[0]


@SHARED.add({"NF101", "IN101"}, "label|target", "rows", lambda setup: setup.kind == "values", structural=True)
def missing_target_in_one_row(setup):
    setup.y = setup.y.copy()
    setup.y[len(setup.y) // 2] = np.nan


@SHARED.add({"IN109", "LO108"}, "target|label", "targets", lambda setup: setup.kind == "values")
def unscaled_targets(setup):
    setup.y, setup.val_y = setup.y * 750 + 15_000, setup.val_y * 750 + 15_000


def normalises(setup: Setup) -> bool:
    """Is there a batch normalisation?"""
    from benchmarks.detection.run import side_of

    if side_of(setup) == "keras":
        return any(type(layer).__name__ == "BatchNormalization" for layer in setup.model._flatten_layers())
    return any("BatchNorm" in type(module).__name__ for module in setup.model.modules())


@SHARED.add({"MO108"}, "batch", "batch", normalises, structural=True)
def batches_of_one_or_two(setup):
    setup.batch = 2
    setup.epochs = 1
    rows = np.random.default_rng(CHANCE).permutation(len(setup.y))[:400]
    setup.x, setup.y = tuple(value[rows] for value in setup.x), setup.y[rows]


@SHARED.add({"IN111", "NF101"}, "input|embedding|index", "indices", lambda setup: not setup.floating, structural=True)
def index_out_of_range(setup):
    setup.x = tuple(value.copy() for value in setup.x)
    setup.x[0][len(setup.y) // 2, 0] = setup.x[0].max() + 5000

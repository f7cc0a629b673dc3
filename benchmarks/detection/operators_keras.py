"""Faults in Keras models and losses."""

from __future__ import annotations

import re

import keras
import numpy as np

from benchmarks.detection.operators import RUNAWAY, STANDSTILL, Catalogue
from benchmarks.detection.operators_settings import labelled, normalises, plain, sgd
from benchmarks.detection.setup import Setup

OWN = Catalogue()
layers = keras.layers
SparseEntropy = keras.losses.SparseCategoricalCrossentropy


def weighted(setup: Setup) -> list[keras.Layer]:
    """Layers with a trainable kernel, in order."""
    kinds = (layers.Dense, layers.Conv1D, layers.Conv2D)
    return [layer for layer in setup.model._flatten_layers() if isinstance(layer, kinds) and layer.trainable]


def hidden(setup: Setup) -> list[keras.Layer]:
    """Those with an activation of their own that is not the last layer's."""
    return [layer for layer in weighted(setup)[:-1] if layer.activation is not keras.activations.linear]


def stacked(setup: Setup) -> bool:
    """Two hidden layers or more."""
    return setup.own and len(hidden(setup)) >= 2


def entropy(setup: Setup) -> bool:
    """A classifier with sparse cross-entropy."""
    return labelled(setup) and isinstance(setup.criterion, SparseEntropy)


def marks(*chosen: keras.Layer) -> str:
    """A pattern for any of these layers."""
    return "|".join(rf"(^|[ ./]){re.escape(layer.name)}($|[ .,/])" for layer in chosen)


def fill(layer: keras.Layer, number: float) -> None:
    """Every element of the kernel."""
    layer.kernel.assign(np.full(layer.kernel.shape, number, dtype="float32"))


@OWN.add({"WT107"}, "init|equal|constant", "initialisation", lambda setup: setup.own and len(weighted(setup)) >= 2, structural=True)
def zero_initialisation(setup):
    for layer in weighted(setup):
        fill(layer, 0.0)


@OWN.add({"WT107"}, "init|equal|constant", "initialisation", stacked, structural=True)
def constant_initialisation(setup):
    for layer in weighted(setup):
        fill(layer, 0.05)


@OWN.add({"LO108", "WT108", "AC103", "GR101", "WT106"}, "init|weights", "initialisation", stacked)
def weights_start_too_large(setup):
    for layer in weighted(setup):
        layer.kernel.assign(layer.kernel * 15)


@OWN.add({"AC101", "AC102", "AC104", "AC105", "GR104"}, "", "bias", lambda setup: stacked(setup) and not normalises(setup), structural=True)
def dead_bias(setup):
    layer = hidden(setup)[1]
    layer.bias.assign(np.full(layer.bias.shape, -20.0, dtype="float32"))
    setup.mark = marks(layer)


@OWN.add(
    {"GR102", "AC103", "WT106", "LO104"}, "gradient|sigmoid|fade", "stack", lambda s: s.own and entropy(s) and isinstance(s.model, keras.Sequential)
)
def stack_of_sigmoids(setup):
    parts = setup.model.layers
    if any("Embedding" in type(part).__name__ for part in parts):
        return
    shape = setup.x[0].shape[1:]
    setup.model = keras.Sequential(
        [keras.Input(shape), layers.Flatten(), *[layers.Dense(64, "sigmoid") for _ in range(10)], layers.Dense(setup.classes, parts[-1].activation)]
    )


@OWN.add({"LO109", "LO110"}, "softmax|loss", "loss", entropy, structural=True)
def softmax_twice(setup):
    if setup.criterion.from_logits:
        setup.model = keras.Sequential([setup.model, layers.Softmax()])
    else:
        setup.criterion = SparseEntropy(from_logits=True)


@OWN.add({"LO109", "LO110"}, "softmax|logits|loss|probabilit", "loss", lambda setup: entropy(setup) and setup.criterion.from_logits, structural=True)
def logits_taken_for_probabilities(setup):
    setup.criterion = SparseEntropy()


@OWN.add({"LO109", "LO110"}, "softmax|axis|loss", "loss", lambda setup: entropy(setup) and setup.criterion.from_logits, structural=True)
def softmax_over_the_batch(setup):
    setup.model = keras.Sequential([setup.model, layers.Softmax(axis=0)])
    setup.criterion = SparseEntropy()


@OWN.add({"LO101", "GR101", "WT105", "LO103", "AC107", "LO110"}, "loss|sign", "loss", plain, structural=True)
def loss_with_the_wrong_sign(setup):
    criterion = setup.criterion
    setup.criterion = lambda targets, outputs: -criterion(targets, outputs)


@OWN.add({"LO110", "LO108", *RUNAWAY}, "sum|averag|mean|learning rate", "sum", sgd)
def summed_loss(setup):
    setup.criterion = type(setup.criterion)(**{**setup.criterion.get_config(), "reduction": "sum"})


@OWN.add({"LO110"}, "output|relu|target", "outputs", lambda setup: setup.kind == "values", structural=True)
def relu_for_signed_targets(setup):
    setup.model = keras.Sequential([*setup.model.layers, layers.ReLU()])


@OWN.add({"MO101"}, "frozen|freez|trainable", "freeze", lambda setup: setup.own and len(weighted(setup)) >= 3, structural=True)
def frozen_by_accident(setup):
    chosen = weighted(setup)[:-1]
    for layer in chosen:
        layer.trainable = False
    setup.mark = marks(*chosen)


def _through(layer: keras.Layer, then) -> None:
    inner = layer.activation
    layer.activation = lambda x: then(inner(x))


@OWN.add({"GR104", "GR108"}, "", "detach", stacked, structural=True)
def detached_branch(setup):
    layer = hidden(setup)[0]
    _through(layer, keras.ops.stop_gradient)
    setup.mark = marks(layer)


@OWN.add({"GR104", "GR108"}, "", "detach", stacked, structural=True)
def rounded_in_the_middle(setup):
    layer = hidden(setup)[0]
    _through(layer, lambda x: keras.ops.round(x * 4) / 4)
    setup.mark = marks(layer)


@OWN.add({"NF101"}, "", "root", lambda setup: stacked(setup) and hidden(setup)[0].activation is keras.activations.relu, structural=True)
def log_of_zero(setup):
    layer = hidden(setup)[0]
    _through(layer, keras.ops.log)
    setup.mark = marks(layer)


@OWN.add({"NF101"}, "", "initialisation", lambda setup: len(weighted(setup)) >= 2, structural=True)
def weight_that_is_not_a_number(setup):
    layer = weighted(setup)[1]
    values = np.array(layer.kernel)
    values.reshape(-1)[0] = np.nan
    layer.kernel.assign(values)
    setup.mark = marks(layer)


@OWN.add({"MO107"}, "", "activation", lambda setup: stacked(setup) and not normalises(setup), structural=True)
def no_activation_between(setup):
    layer = hidden(setup)[-1]
    after = weighted(setup)[weighted(setup).index(layer) + 1]
    layer.activation = keras.activations.linear
    setup.mark = marks(layer, after)


@OWN.add({"MO109"}, "momentum|running|statistics|moving", "running", normalises)
def running_statistics_unsettled(setup):
    for layer in setup.model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.999


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate|decay", "schedule", structural=True)
def schedule_for_epochs_stepped_per_batch(setup):
    setup.schedule = lambda setup: keras.optimizers.schedules.ExponentialDecay(setup.rate, 1, 0.9)


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate", "schedule", lambda setup: setup.schedule is not None, structural=True)
def schedule_too_long(setup):
    setup.schedule = lambda setup: keras.optimizers.schedules.CosineDecay(0.0, setup.steps, warmup_target=setup.rate, warmup_steps=setup.steps * 20)


@OWN.add({"LR102", *STANDSTILL}, "schedule|learning rate", "schedule")
def schedule_too_short(setup):
    setup.schedule = lambda setup: keras.optimizers.schedules.CosineDecay(setup.rate, max(2, setup.steps // 10))

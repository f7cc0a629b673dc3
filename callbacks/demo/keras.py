"""The demo's Keras programs. Each broken one differs from the healthy one in the arguments that its line shows."""

from __future__ import annotations

import sys
from pathlib import Path

import keras

from trainvet.callbacks.demo.data import digits, with_a_hole
from trainvet.callbacks.demo.program import HEALTHY, Program, run
from trainvet.callbacks.keras import Diagnostics
from trainvet.report import Report


def train(log_dir: Path, *, rate: float = 1e-3, bias: float = 0.0, hole: bool = False, start: str = "glorot_uniform") -> Report:
    """Train a net of three layers for ten epochs (220 steps) and return what trainvet says."""
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    (images, labels), validation = digits()
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="hidden_1", kernel_initializer=start),
            keras.layers.Dense(64, activation="relu", name="hidden_2", kernel_initializer=start, bias_initializer=keras.initializers.Constant(bias)),
            keras.layers.Dense(10, name="logits", kernel_initializer=start),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    diagnostics = Diagnostics(log_dir=log_dir)
    images = with_a_hole(images) if hole else images
    model.fit(images, labels, batch_size=64, epochs=10, validation_data=validation, verbose=0, callbacks=[diagnostics])
    return diagnostics.report


PROGRAMS = (
    Program("healthy", "a healthy net", HEALTHY, train),
    Program("high-rate", "learning rate 1.0 instead of 0.001", "WT104", lambda log_dir: train(log_dir, rate=1.0)),
    Program("missing-row", "one image of 1,408 is NaN", "IN101", lambda log_dir: train(log_dir, hole=True)),
    Program("dead-layer", "a layer of ReLU units starts with bias -6", "AC101", lambda log_dir: train(log_dir, bias=-6.0)),
    Program("zero-weights", "all weights start at 0", "WT107", lambda log_dir: train(log_dir, start="zeros")),
)

if __name__ == "__main__":
    sys.exit(run("keras", PROGRAMS, sys.argv[1:]))

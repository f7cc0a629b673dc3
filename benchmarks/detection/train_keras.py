"""Trains a Keras setup as a user would, with ``fit`` and trainvet at its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.detection.setup import Array, Setup
from trainvet.report import Report


def seed_all(seed: int) -> None:
    """Before a recipe builds its model."""
    keras.utils.set_random_seed(seed)


def optimizer(setup: Setup) -> Any:
    """By name."""
    fields: dict[str, Any] = {"learning_rate": setup.schedule(setup) if setup.schedule is not None else setup.rate}
    if setup.clip:
        fields["global_clipnorm"] = setup.clip
    if setup.decay or setup.optimizer == "adamw":
        fields["weight_decay"] = setup.decay or 0.004
    if setup.epsilon:
        fields["epsilon"] = setup.epsilon
    if setup.optimizer == "sgd":
        return keras.optimizers.SGD(momentum=setup.momentum, **fields)
    return {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW, "rmsprop": keras.optimizers.RMSprop}[setup.optimizer](**fields)


def inputs(x: tuple[Array, ...]) -> Any:
    """One array, or several."""
    return x[0] if len(x) == 1 else x


class Jump(keras.callbacks.Callback):
    """A rate that is multiplied at some step, as by a callback gone wrong."""

    def __init__(self, step: int, rate: float) -> None:
        super().__init__()
        self.step, self.rate, self.seen = step, rate, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.seen == self.step:
            self.model.optimizer.learning_rate = self.rate
        self.seen += 1


def fit(setup: Setup, callbacks: list[Any]) -> None:
    """Compile and train."""
    extra = [Jump(setup.jump[0], setup.rate * setup.jump[1])] if setup.jump is not None else []
    setup.model.compile(optimizer(setup), setup.criterion)
    setup.model.fit(
        inputs(setup.x),
        setup.y,
        batch_size=setup.batch,
        epochs=setup.epochs,
        shuffle=setup.shuffle,
        validation_data=(inputs(setup.val_x), setup.val_y),
        verbose=0,
        callbacks=[*extra, *callbacks],
    )


def predict(setup: Setup, x: tuple[Array, ...]) -> Array:
    """The model's outputs on unseen data."""
    return np.asarray(setup.model.predict(inputs(x), batch_size=256, verbose=0), dtype=np.float32)


def train(setup: Setup, framework: str, log_dir: Path | None) -> tuple[Report | None, str]:
    """Train to the end, or to the exception whose text is returned."""
    from trainvet.callbacks.keras import Diagnostics

    diagnostics = None if log_dir is None else Diagnostics(log_dir=log_dir)
    crash = ""
    try:
        fit(setup, [] if diagnostics is None else [diagnostics])
    except Exception as error:
        crash = f"{type(error).__name__}: {error}"[:300]
    return (None if diagnostics is None else diagnostics.report), crash

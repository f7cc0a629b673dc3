"""A run that stands still is told of; one whose batches go on is not, however rarely we look at it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
X, Y = np.ones((40, 2), "float32"), np.ones((40, 1), "float32")
SELECT = {"select": ("RN102",), "rules": (), "every": 1000, "settings": {"stalled-run": {"seconds": 1.0}}}


def make():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)  # tracing alone may take longer than the limit of these tests
    model.train_on_batch(X[:4], Y[:4])
    model.test_on_batch(X[:4], Y[:4])
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, pauses):
        super().__init__()
        self.pauses = pauses

    def __len__(self):
        return len(self.pauses)

    def __getitem__(self, index):
        time.sleep(self.pauses[index])
        return X[:4], Y[:4]


def fit(callback, pauses, model=None, **arguments):
    (model or make()).fit(Batches(pauses), verbose=0, shuffle=False, callbacks=[callback], **arguments)
    assert [thread for thread in threading.enumerate() if thread.name == "trainvet-watchdog"] == []


def test_an_epoch_longer_than_the_limit_that_moves_on_is_left_alone(watch, tmp_path):
    callback = watch(**SELECT)
    fit(callback, [0.1] * 20)
    assert callback.report.findings == ()
    assert callback.report.errors == ()
    assert list(tmp_path.rglob("stalled-*")) == []


def test_a_validation_longer_than_the_limit_that_moves_on_is_left_alone(watch):
    callback = watch(**SELECT)
    fit(callback, [0.0] * 3, validation_data=Batches([0.1] * 20))
    assert callback.report.findings == ()


@pytest.mark.parametrize("every", [1, 1000])
def test_a_generator_that_freezes_is_told_with_the_place(every, watch):
    callback = watch(**SELECT | {"every": every})
    fit(callback, [0.0] * 6 + [4.0] + [0.0] * 3)
    (found,) = callback.report.findings
    assert found.code == "RN102"
    assert 1.0 <= found.evidence["seconds"] < 4
    assert "__getitem__" in Path(str(found.evidence["stacks"])).read_text()


def test_a_run_that_is_not_measured_shows_life_too(watch):
    callback = watch(**SELECT)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = make()
    fit(callback, [0.1] * 20, model)
    assert callback.report.findings == ()
    assert "nothing is observed" in "".join(callback.report.notes)

"""Where measuring would change the training, or is not there yet: the training goes on untouched, and the report says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
X = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
Y = X[:, :1].copy()


class Noisy(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_step_whose_random_numbers_depend_on_the_graph_is_left_alone(blocks, watch):
    """TensorFlow's stateful random operations keep their state in the graph: two graphs would draw the same numbers twice."""
    states, callback = [], watch(every=1)
    for callbacks in ([], [callback]):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), Noisy(), layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse", steps_per_execution=blocks)
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        states.append((history.history, [keras.ops.convert_to_numpy(value) for value in model.weights]))
    assert states[0][0] == states[1][0]
    np.testing.assert_array_equal(states[0][1][0], states[1][1][0])
    assert any("RandomStandardNormal" in note for note in callback.report.notes)
    assert callback.report.errors == ()
    assert callback.history("gradient.norm").steps.size == 0
    assert callback.history("loss.value").steps.tolist() == (list(range(10)) if blocks == 1 else [3, 4, 8, 9])


def test_several_replicas_are_left_alone(watch):
    callback = watch(every=1)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert callback.report.errors == ()
    assert any("MirroredStrategy" in note for note in callback.report.notes)
    assert callback.report.coverage[0].state == "not observable"


OTHER = """
import json, sys
import numpy as np, keras
from trainvet.callbacks.keras import Diagnostics
assert "tensorflow" not in sys.modules
told = []
for callbacks in ([], [Diagnostics(log_dir=sys.argv[1])]):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    told.append(model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history["loss"])
report = callbacks[0].report
states = sorted({item.state for item in report.coverage})
print(json.dumps({"same": told[0] == told[1], "notes": report.notes, "errors": report.errors, "states": states}))
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends_are_told_apart_from_healthy(backend, tmp_path):
    pytest.importorskip(backend)
    environment = {**os.environ, "KERAS_BACKEND": backend}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(OTHER), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.strip().splitlines()[-1])
    assert told["same"]
    assert told["errors"] == []
    assert told["notes"] == [f"not supported yet with backend {backend}: nothing is observed"]
    assert told["states"] == ["not observable"]

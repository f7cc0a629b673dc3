"""Where measuring would change the training, or is not there yet: the training goes on untouched, and the report says so."""

from __future__ import annotations

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

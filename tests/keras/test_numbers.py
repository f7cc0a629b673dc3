"""Measured numbers against an independent back-propagation in numpy, and against what a tensor holds."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.recorder import recorder_of
from trainvet.integrations.keras.kernels import Reducer

layers = keras.layers
RATE = 0.05


def backpropagation(weights, x, y):
    """Gradients of the mean squared error of relu(x A + a) B + b, in float64."""
    a_matrix, a_bias, b_matrix, b_bias = weights
    before = x @ a_matrix + a_bias
    hidden = np.maximum(before, 0)
    error = hidden @ b_matrix + b_bias - y
    slope = 2 * error / error.size
    back = (slope @ b_matrix.T) * (before > 0)
    return [x.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0)], float((error**2).mean()), hidden


@pytest.mark.parametrize("scale", [None, 2.0**10])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_updates_and_weights_are_those_of_numpy(scale, clip, watch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(7, activation="relu", name="a"), layers.Dense(2, name="b")])
    optimizer = keras.optimizers.SGD(RATE, loss_scale_factor=scale, global_clipnorm=clip)
    model.compile(optimizer=optimizer, loss="mse")
    generator = np.random.default_rng(2)
    x, y = generator.standard_normal((40, 5)).astype("float32"), generator.standard_normal((40, 2)).astype("float32")
    weights = [keras.ops.convert_to_numpy(variable).astype(np.float64) for variable in model.weights]
    callback = watch(every=1)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    sampled = recorder_of(callback).sampled
    assert len(sampled) == 5
    for step, snapshot in enumerate(sampled):
        batch = slice(8 * step, 8 * step + 8)
        gradients, loss, hidden = backpropagation(weights, x[batch].astype(np.float64), y[batch].astype(np.float64))
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = min(1.0, clip / norm) if clip else 1.0
        updates = [-RATE * factor * gradient for gradient in gradients]
        after = [weight + update for weight, update in zip(weights, updates, strict=True)]
        names, column = snapshot.column("gradient.norm")
        assert names == ("a.kernel", "a.bias", "b.kernel", "b.bias")
        close = functools.partial(check, snapshot)
        np.testing.assert_allclose(column, [np.linalg.norm(gradient) for gradient in gradients], rtol=2e-5)
        close("gradient.rms", [np.sqrt((gradient**2).mean()) for gradient in gradients])
        close("gradient.mean", [gradient.mean() for gradient in gradients], 1e-3)
        close("gradient.abs_mean", [np.abs(gradient).mean() for gradient in gradients])
        close("gradient.std", [gradient.std() for gradient in gradients], 1e-4)
        close("gradient.min", [gradient.min() for gradient in gradients])
        close("gradient.max", [gradient.max() for gradient in gradients])
        close("gradient.abs_max", [np.abs(gradient).max() for gradient in gradients])
        close("gradient.zero_share", [(gradient == 0).mean() for gradient in gradients])
        close("weight.norm", [np.linalg.norm(weight) for weight in after])
        close("weight.rms", [np.sqrt((weight**2).mean()) for weight in after])
        close("update.rms", [np.sqrt((update**2).mean()) for update in updates], 1e-3)
        sizes = [np.linalg.norm(weight) for weight in weights]
        truth = [np.linalg.norm(update) / size if size else np.inf for update, size in zip(updates, sizes, strict=True)]
        close("update.ratio", truth, 1e-3)
        close("update.unchanged", [0, 0, 0, 0])
        assert snapshot.tracks("loss.value")["loss"].values[-1] == pytest.approx(loss, rel=1e-5)
        assert snapshot.tracks("run.gradient_norm")["run"].values[-1] == pytest.approx(norm, rel=1e-5)
        assert snapshot.tracks("optimizer.learning_rate")["SGD"].values[-1] == pytest.approx(RATE)
        activations = dict(zip(snapshot.column("activation.rms")[0], snapshot.column("activation.rms")[1], strict=True))
        assert activations["a"] == pytest.approx(np.sqrt((hidden**2).mean()), rel=1e-5)
        assert snapshot.values("activation.zero_share", ("a",))[0] == pytest.approx((hidden == 0).mean())
        assert snapshot.values("input.mean", ("input",))[0] == pytest.approx(x[batch].mean(), abs=1e-6)
        assert snapshot.values("label.mean_square", ("label",))[0] == pytest.approx((y[batch] ** 2).mean(), rel=1e-5)
        assert snapshot.values("label.count", ("label",))[0] == 8
        weights = after


def check(snapshot, key, truth, tolerance=3e-5):
    np.testing.assert_allclose(snapshot.column(key)[1], truth, rtol=tolerance, atol=1e-6)


def test_rows_of_an_embedding_that_occur_twice_are_summed(watch):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((3,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(1, name="out")(layers.Flatten()(layers.Embedding(500, 4, name="table")(tokens))))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    ids, y = np.array([[1, 1, 2], [2, 2, 2]], dtype="int32"), np.ones((2, 1), dtype="float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(ids) - y) ** 2)
    truth = tf.convert_to_tensor(tape.gradient(loss, model.trainable_weights[0])).numpy()
    callback = watch(every=1)
    model.fit(ids, y, batch_size=2, verbose=0, callbacks=[callback])
    snapshot = recorder_of(callback).sampled[0]
    told = {key: snapshot.values(f"gradient.{key}", ("table.embeddings",))[0] for key in ("norm", "zero_share", "min", "max", "rms", "mean")}
    assert told["norm"] == pytest.approx(np.linalg.norm(truth), rel=1e-5)
    assert told["zero_share"] == pytest.approx((truth == 0).mean())
    assert (told["min"], told["max"]) == pytest.approx((truth.min(), truth.max()), rel=1e-5)
    assert told["rms"] == pytest.approx(np.sqrt((truth**2).mean()), rel=1e-5)
    assert told["mean"] == pytest.approx(truth.mean(), rel=1e-3)
    assert snapshot.values("update.unchanged", ("table.embeddings",))[0] == 0


def test_a_missing_gradient_is_not_present(watch):
    keras.utils.set_random_seed(1)

    class Apart(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.apart = layers.Dense(1, name="used"), layers.Dense(1, name="apart")

        def call(self, x):
            return self.used(x) + keras.ops.stop_gradient(self.apart(x))

    model = Apart()
    model.compile(optimizer="sgd", loss="mse")
    callback = watch(every=1)
    model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0, callbacks=[callback])
    snapshot = recorder_of(callback).sampled[0]
    assert snapshot.values("gradient.present", ("used.kernel", "apart.kernel")).tolist() == [1, 0]
    assert snapshot.values("gradient.norm", ("apart.kernel",))[0] == 0
    assert snapshot.values("update.unchanged", ("used.kernel", "apart.kernel")).tolist() == [0, 1]


def test_accumulated_gradients_are_those_of_the_update(watch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, name="only")])
    model.compile(optimizer=keras.optimizers.SGD(0.0, gradient_accumulation_steps=3), loss="mse")
    x, y = np.random.default_rng(0).standard_normal((24, 3)).astype("float32"), np.ones((24, 1), "float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x[:12]) - y[:12]) ** 2)
    truth = [np.linalg.norm(gradient) for gradient in tape.gradient(loss, model.trainable_weights)]
    callback = watch(every=1)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
    sampled = recorder_of(callback).sampled
    assert [snapshot.step for snapshot in sampled] == [2, 5]
    assert [snapshot.applied for snapshot in sampled] == [1, 2]
    np.testing.assert_allclose(sampled[0].column("gradient.norm")[1], truth, rtol=1e-5)
    assert callback.history("loss.value").steps.tolist() == list(range(6))


def test_non_finite_and_tiny_gradients_are_counted_exactly():
    reducer = Reducer()
    tensors = {
        "fine": tf.constant([3.0, 4.0]),
        "huge": tf.constant([3e20, 4e20]),
        "tiny": tf.constant([3e-25, 4e-25]),
        "bad": tf.constant([np.nan, np.inf, -np.inf, 1.0, np.nan]),
        "zero": tf.zeros([4]),
    }
    squares = {name: reducer.reduce(tensor, frozenset({"square"}))["square"] for name, tensor in tensors.items()}
    found = {name: [float(row[raw]) for raw in ("nan", "inf", "exact")] for name, row in reducer.examine(tensors, squares).items()}
    assert found["fine"] == pytest.approx([0, 0, 5])
    assert found["huge"] == pytest.approx([0, 0, 5e20])
    assert found["tiny"] == pytest.approx([0, 0, 5e-25])
    assert found["bad"][:2] == [2, 2]
    assert np.isnan(found["bad"][2])
    assert found["zero"] == [0, 0, 0]
    assert [float(value) for value in reducer.examine({"fine": tensors["fine"]}, squares)["fine"].values()] == [0, 0, -1]


def test_equal_units():
    table = np.random.default_rng(0).standard_normal((50, 4)).astype("float32")
    equal = np.repeat(table[:, :1], 4, axis=1)
    nearly = equal.copy()
    nearly[33, 2] += 1
    tables = {"random": table, "equal": equal, "nearly": nearly, "rows": np.repeat(table[:1], 50, axis=0), "lone": table[:, :1], "bias": table[0]}
    flat = {name: tf.constant(values.ravel()) for name, values in tables.items()}
    found = Reducer().identical(flat, {name: values.shape for name, values in tables.items()}, frozenset({"rows"}))
    assert {name: float(mark) for name, mark in found.items()} == {"random": 0, "equal": 1, "nearly": 0, "rows": 1}


def test_equal_units_in_a_training(watch):
    """Constant weights are equal, also where they are all zero; their gradients only where they are not."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, kernel_initializer="ones", name="a"), layers.Dense(3, kernel_initializer="zeros", name="b")]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    callback = watch(every=1)
    x = np.random.default_rng(0).standard_normal((8, 5)).astype("float32")
    model.fit(x, x[:, :3], batch_size=8, verbose=0, callbacks=[callback])
    snapshot = recorder_of(callback).sampled[0]
    assert snapshot.values("weight.identical_rows", ("a.kernel", "b.kernel")).tolist() == [1, 1]
    assert snapshot.values("gradient.identical_rows", ("a.kernel", "b.kernel")).tolist() == [0, 0]

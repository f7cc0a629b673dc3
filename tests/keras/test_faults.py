"""Faults in real trainings: the right step, the right place, and what TensorFlow hides."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.keras.recorder import recorder_of

layers = keras.layers
RNG = np.random.default_rng(5)


@keras.saving.register_keras_serializable("trainvet-tests")
class Standardise(layers.Layer):
    """Divides by the batch's own standard deviation, which may be 0."""

    def call(self, x):
        return (x - keras.ops.mean(x, axis=0)) / keras.ops.std(x, axis=0, keepdims=True)


@keras.saving.register_keras_serializable("trainvet-tests")
class Kink(layers.Layer):
    """The identity, with a slope that is not finite."""

    def call(self, x):
        return x + keras.ops.sqrt(keras.ops.abs(x - keras.ops.stop_gradient(x)))


def regression(batches, size=8):
    x = RNG.standard_normal((batches * size, 6)).astype("float32")
    return x, (x @ RNG.standard_normal((6, 1))).astype("float32")


def model_with(*middle, **compile_):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(8, activation="relu", name="d1"), layers.Dense(1, name="d2")])
    model.compile(optimizer=keras.optimizers.SGD(0.02), loss="mse", **compile_)
    return model


def finding(callback):
    found = [item for item in callback.report.findings if item.code == "NF101"]
    assert found, callback.report.to_text()
    return found[0]


def fit(model, x, y, callback, **arguments):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback], **arguments)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}, {"steps_per_execution": 5}], ids=["graph", "eager", "blocks"])
def test_the_layer_that_made_the_value_is_named(mode, watch):
    x, y = regression(20)
    x[13 * 8 : 14 * 8, 3] = 0.75  # a constant column, in one batch
    callback = watch(select=("NF101",), rules=(), every=1)
    model = model_with(Standardise(name="standardise"), **mode)
    fit(model, x, y, callback)
    found = finding(callback)
    assert (found.step, found.where) == (13, "standardise")
    assert found.evidence["batch"] == 13
    assert found.evidence["input_min"] == pytest.approx(float(x[13 * 8 : 14 * 8].min()))


def test_locating_changes_nothing(watch):
    x, y = regression(6)
    x[3 * 8 : 4 * 8, 3] = 0.75
    states = []
    for callbacks in ([], [watch(select=("NF101",), rules=(), every=1)]):
        keras.backend.clear_session()
        model = model_with(Standardise(name="standardise"), layers.BatchNormalization(name="bn"), layers.Dropout(0.3))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        states.append([keras.ops.convert_to_numpy(variable) for variable in model.variables])
    assert finding(callbacks[0]).where == "standardise"
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_that_was_not_measured_is_still_told_exactly(watch):
    x, y = regression(40)
    x[27 * 8 : 28 * 8, 3] = 0.75
    callback = watch(select=("NF101",), rules=(), every=1000)
    fit(model_with(Standardise(name="standardise")), x, y, callback)
    found = finding(callback)
    assert found.first_step == 27
    assert np.isnan(callback.history("loss.value").values[-1]).any()


def test_nan_that_a_fused_kernel_may_hide_is_found_in_the_input(watch):
    """On some machines matrix product, bias and ReLU in one kernel turn NaN into 0, and the loss stays finite for ever; it is found all the same."""
    x = RNG.standard_normal((12 * 32, 64)).astype("float32")
    x[4 * 32 :, 2] = np.nan
    y = RNG.integers(0, 10, len(x))
    told = []
    for callbacks in ([], [watch(select=("NF101",), rules=(), every=1)]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10, activation="softmax")])
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
        told.append(model.fit(x, y, batch_size=32, shuffle=False, verbose=0, callbacks=callbacks).history["loss"])
    np.testing.assert_array_equal(*told)
    found = finding(callbacks[0])
    assert (found.step, found.where) == (4, "input")


def test_a_value_born_in_the_backward_pass(watch):
    x, y = regression(4)
    callback = watch(select=("NF101",), rules=(), every=1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="a"), Kink(name="kink"), layers.Dense(1, name="b")])
    model.compile(optimizer="sgd", loss="mse")
    fit(model, x, y, callback)
    found = finding(callback)
    assert found.step == 0
    assert found.subjects[0].startswith("a.")


def test_of_several_outputs_the_bad_one_is_named(watch):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", name="trunk")(inputs)
    model = keras.Model(
        inputs, {"colour": layers.Dense(1, name="colour")(hidden), "depth": layers.Dense(1, activation="softplus", name="depth")(hidden)}
    )
    log_error = lambda y, p: keras.ops.mean((keras.ops.log(p) - keras.ops.log(y)) ** 2, axis=-1)  # noqa: E731
    model.compile(optimizer=keras.optimizers.SGD(0.02), loss={"colour": "mse", "depth": log_error})
    x, y = regression(12)
    far = np.exp(0.3 * y)
    far[7 * 8 + 2] = -1.0
    callback = watch(select=("NF101",), rules=(), every=1)
    fit(model, x, {"colour": y, "depth": far}, callback)
    found = finding(callback)
    assert found.step == 7
    assert "depth" in found.where
    assert "colour" not in found.where
    assert set(callback.history("loss.value").subjects) == {"loss", "colour", "depth"}


def test_masked_steps_are_no_dead_units(watch):
    """Half of the places are padding; a unit that is active in the others is alive, and padding counts as no position."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 5, mask_zero=True, name="table")(tokens)
    hidden = layers.Dense(8, activation="relu", name="units")(hidden)
    model = keras.Model(tokens, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(optimizer="sgd", loss="mse")
    ids = RNG.integers(1, 20, (16, 6)).astype("int32")
    ids[:, 3:] = 0
    callback = watch(every=1)
    fit(model, ids, np.ones((16, 1), "float32"), callback)
    snapshot = recorder_of(callback).sampled[0]
    assert snapshot.values("activation.positions", ("units",))[0] == 8 * 3
    assert snapshot.values("activation.batches", ("units",))[0] == 1
    assert 0 <= snapshot.values("activation.zero_share", ("units",))[0] < 1

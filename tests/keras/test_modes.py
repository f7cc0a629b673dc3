"""Ways to train that Keras offers, each in a tiny real fit: nothing breaks, the numbers are there, and the rules see what they should."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.recorder import recorder_of

layers = keras.layers
RNG = np.random.default_rng(6)
X = RNG.standard_normal((32, 4)).astype("float32")
Y = (X @ np.ones((4, 1), "float32")).astype("float32")


class Own(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def make(kind=keras.Sequential, **compile_):
    keras.utils.set_random_seed(4)
    model = kind([keras.Input((4,)), layers.Dense(5, activation="relu", name="a"), layers.Dense(1, name="b", dtype="float32")])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", **compile_})
    return model


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        (keras.Sequential, {"steps_per_execution": 4}),
        (keras.Sequential, {"jit_compile": True}),
        (keras.Sequential, {"run_eagerly": True}),
        (Own, {}),
    ],
    ids=["several steps", "XLA", "eager", "own train_step"],
)
def test_a_mode_is_measured_and_changes_nothing(kind, compiled, watch):
    plain = make(kind, **compiled)
    plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    model, callback = make(kind, **compiled), watch(every=2)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.report.errors == ()
    assert callback.report.steps == 8
    for ours, without in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, without, rtol=1e-5, atol=1e-7)
    snapshot = recorder_of(callback).sampled[-1]
    assert (snapshot.values("gradient.norm", ("a.kernel", "b.kernel")) > 0).all()
    assert snapshot.values("output.units", ("output",))[0] == 1
    assert snapshot.values("module.called", ("a",))[0] == 1


def test_sample_weights_are_known(watch):
    model, callback = make(), watch(every=1)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback], sample_weight=np.linspace(0, 1, 32))
    assert callback.report.errors == ()
    assert recorder_of(callback).plans[-1].balanced


def test_mixed_precision(watch):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make(optimizer="sgd")
    finally:
        keras.config.set_dtype_policy("float32")
    callback = watch(every=1)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert callback.report.errors == ()
    facts = recorder_of(callback).plans[-1]
    assert (facts.precision, facts.autocast, facts.loss_scaler) == ("16-mixed", "float16", True)
    snapshot = next(item for item in recorder_of(callback).sampled if "gradient" in item.tables)
    assert np.isfinite(snapshot.values("gradient.underflow_share", ("a.kernel", "b.kernel"))).all()


def test_batch_normalisation_over_single_samples_is_told(watch):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, name="a"), layers.BatchNormalization(name="bn"), layers.Dense(1, name="b")])
    model.compile("sgd", "mse")
    callback = watch(every=1, select=("MO108",), rules=())
    model.fit(X, Y, batch_size=1, verbose=0, callbacks=[callback])
    assert [found.code for found in callback.report.findings] == ["MO108"]
    fine = watch(every=1, select=("MO108",), rules=())
    model.fit(X, Y, batch_size=16, epochs=8, verbose=0, callbacks=[fine])
    assert fine.report.findings == ()


def test_a_validation_of_another_scale_is_told(watch):
    for factor, expected in ((255.0, ["IN106"]), (1.0, [])):
        callback = watch(every=1, select=("IN106",), rules=())
        inputs, targets = np.tile(np.abs(X) / 4, (4, 1)), np.tile(Y, (4, 1))
        make().fit(inputs, targets, batch_size=16, epochs=2, verbose=0, callbacks=[callback], validation_data=(inputs * factor, targets))
        assert callback.report.errors == ()
        assert [found.code for found in callback.report.findings] == expected

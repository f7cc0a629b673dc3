"""What losses expect and are given, layers, modules and validations, in tiny real fits."""

from __future__ import annotations

import keras
import numpy as np

from tests.keras.recorder import recorder_of

layers = keras.layers
RNG = np.random.default_rng(4)
X = RNG.random((32, 4)).astype("float32")
Y = RNG.integers(0, 3, 32)


def test_a_classifier_with_a_validation_of_another_scale(watch):
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(8, name="a"), layers.BatchNormalization(name="bn"), layers.ReLU(name="r"), layers.Dropout(0.2, name="d")]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(3, activation="softmax", name="o")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = watch(every=1)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0, callbacks=[callback], validation_data=(X * 9, Y))
    record = recorder_of(callback)
    assert callback.report.errors == ()
    facts = record.plans[-1]
    (loss,) = facts.losses
    assert (loss.expects, loss.output_function, loss.output_layer, loss.output_axis) == ("logits", "softmax", "o", 1)
    found = {layer.name: layer for layer in facts.layers}
    assert found["bn"].after == ("a",)
    assert (found["a"].width_in, found["a"].width_out, found["d"].rate) == (4, 8, 0.2)
    assert (facts.shuffled, facts.samples_per_epoch, facts.batches_per_epoch) == (True, 32, 2)
    snapshot = record.sampled[0]
    assert snapshot.values("output.simplex_share", ("output",))[0] == 1
    assert snapshot.values("module.training", ("bn",))[0] == 1
    assert snapshot.values("module.values", ("bn",))[0] == 16
    evaluation = next(item for item in record.sampled if "validation_input" in item.tables)
    assert evaluation.step == 1
    np.testing.assert_allclose(evaluation.values("validation_input.mean", ("input",)), [9 * X.mean()], rtol=1e-5)
    assert evaluation.values("validation_module.training", ("bn",))[0] == 0
    np.testing.assert_allclose(evaluation.values("validation_module.unsettled", ("bn",)), [0.99**2])
    metrics = next(item for item in record.snapshots if item.tracks("metric.value"))
    assert set(metrics.tracks("metric.value")) == {"loss", "val_loss"}
    assert not hasattr(vars(model).get("test_function"), "__self__")


def test_several_outputs_have_names_of_their_own(watch):
    inputs = keras.Input((4,))
    one, two = layers.Dense(1, activation="sigmoid", name="one")(inputs), layers.Dense(1, name="two")(inputs)
    model = keras.Model(inputs, {"one": one, "two": two})
    model.compile("sgd", loss={"one": "binary_crossentropy", "two": "mse"})
    callback = watch(every=1)
    binary = (Y[:, None] > 0).astype("float32")
    model.fit(X, {"one": binary, "two": binary}, batch_size=16, verbose=0, callbacks=[callback])
    assert callback.report.errors == ()
    told = {loss.output: (loss.label, loss.expects, loss.output_function) for loss in recorder_of(callback).plans[-1].losses if loss.output}
    assert told == {"output.one": ("label.one", "probabilities", "sigmoid"), "output.two": ("label.two", "values", "linear")}

"""With and without trainvet: the same weights, optimizer state, history and saved weights, bit for bit, and nothing left behind."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.recorder import recorder_of

layers = keras.layers
RNG = np.random.default_rng(3)
X = RNG.standard_normal((72, 6)).astype("float32")
Y = (X @ RNG.standard_normal((6, 1))).astype("float32")
IDS = RNG.integers(1, 30, (72, 5)).astype("int32")
IDS[:, 3:][IDS[:, 3:] % 2 == 0] = 0


def dense(**compile_):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(4, activation="tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **compile_})
    return model, X, Y


def subclassed(**compile_):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(8), layers.Dense(1)

        def call(self, x, training=False):
            return self.last(keras.ops.relu(self.first(x)))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True))
            return {"loss": loss}

    model = Own()
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="mse", **compile_)
    return model, X, Y


def sequence(kind, **compile_):
    tokens = keras.Input((5,), dtype="int32")
    hidden = kind(6)(layers.Embedding(300, 8, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer=keras.optimizers.RMSprop(0.01), loss="binary_crossentropy", **compile_)
    return model, IDS, (IDS[:, :1] % 2).astype("float32")


def outputs(**compile_):
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="gelu")(inputs)
    model = keras.Model(inputs, {"colour": layers.Dense(1, name="colour")(hidden), "depth": layers.Dense(1, name="depth")(hidden)})
    model.compile(optimizer="adam", loss={"colour": "mse", "depth": "mae"}, loss_weights={"colour": 1.0, "depth": 0.3}, **compile_)
    return model, X, {"colour": Y, "depth": Y + 1}


def frozen(**compile_):
    model, x, y = dense()
    model.layers[0].trainable = False
    model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.01), loss="mse", **compile_)
    return model, x, y


def half(optimizer, **compile_):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense(optimizer=optimizer(), **compile_)
    finally:
        keras.config.set_dtype_policy("float32")


def attention(**compile_):
    inputs = keras.Input((5, 8))
    hidden = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 4)(inputs, inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(optimizer="adam", loss="mse", **compile_)
    return model, RNG_SEQUENCES, Y


def separate(**compile_):
    """Activations as layers of their own, products and sums in a row: what the graph optimiser likes to regroup and fuse."""
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.3)(layers.Activation("gelu")(layers.Dense(8)(inputs)))
    hidden = layers.Add()([hidden, layers.Dense(8)(hidden), layers.Dense(8, kernel_regularizer="l2")(hidden)])
    hidden = layers.Multiply()([layers.ReLU()(layers.BatchNormalization()(hidden)), layers.Dense(8, activation="sigmoid")(hidden)])
    model = keras.Model(inputs, layers.Dense(1)(layers.Rescaling(0.5)(hidden)))
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), loss="mse", **compile_)
    return model, X, Y


def convolution(**compile_):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Conv2D(4, 2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Conv2D(3, 1),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="sparse_categorical_crossentropy", metrics=["accuracy"], **compile_)
    return model, IMAGES, (Y[:, 0] > 0).astype("int32")


IMAGES = RNG.standard_normal((72, 6, 6, 1)).astype("float32")
RNG_SEQUENCES = RNG.standard_normal((72, 5, 8)).astype("float32")
SGD, ADAM, SCALED = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer
MODES = {
    "graph": dense,
    "eager": lambda: dense(run_eagerly=True),
    "xla": lambda: dense(jit_compile=True),
    "block of 4": lambda: dense(steps_per_execution=4),
    "accumulation": lambda: dense(optimizer=ADAM(0.01, gradient_accumulation_steps=3)),
    "clipping and a static loss scale": lambda: dense(optimizer=SGD(0.01, global_clipnorm=0.1, loss_scale_factor=8.0)),
    "moving average": lambda: dense(optimizer=SGD(0.01, use_ema=True, ema_overwrite_frequency=4)),
    "float16 with a loss scaler": lambda: half(lambda: SCALED(SGD(0.01), initial_scale=2.0**18, dynamic_growth_steps=3)),
    "float16 in blocks": lambda: half(lambda: SCALED(ADAM(0.01), initial_scale=2.0**40), steps_per_execution=4),
    "schedule": lambda: dense(optimizer=SGD(keras.optimizers.schedules.CosineDecay(0.1, 20))),
    "frozen layer": frozen,
    "outputs in blocks": lambda: outputs(steps_per_execution=4),
    "own train_step": subclassed,
    "gru": lambda: sequence(layers.GRU),
    "lstm in blocks": lambda: sequence(layers.LSTM, steps_per_execution=4),
    "attention": attention,
    "separate activations": separate,
    "convolution": convolution,
}


def trained(make, callbacks, tmp_path, **fit):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model, x, y = make()
    data = fit.pop("data", None)
    before = set(vars(model))
    arguments = {"batch_size": 8, "epochs": 2, "verbose": 0, **fit}
    if data is not None:
        x, y = data(x, y), None
        del arguments["batch_size"]
    history = model.fit(x, y, callbacks=callbacks, **arguments)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    return model, {
        "weights": [keras.ops.convert_to_numpy(value) for value in model.variables],
        "optimizer": [keras.ops.convert_to_numpy(value) for value in model.optimizer.variables],
        "history": history.history,
        "file": contents(path),
        "attributes": set(vars(model)) - before,
        "layers": [set(vars(layer)) for layer in model._flatten_layers()],
    }


def contents(path):
    """Names, attributes and bytes of everything in the file; its time stamps differ."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: (dict(item.attrs), item[()].tobytes() if isinstance(item, h5py.Dataset) else b"")}))
    return found


def assert_same(one, other, exact=True):
    assert one.keys() == other.keys()
    for part in ("weights", "optimizer"):
        assert len(one[part]) == len(other[part])
        for left, right in zip(one[part], other[part], strict=True):
            np.testing.assert_allclose(left, right, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)
    if exact:
        assert one["history"] == other["history"]
        assert one["file"] == other["file"]
    assert one["file"].keys() == other["file"].keys()
    assert one["attributes"] == other["attributes"]
    assert one["layers"] == other["layers"]


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_bit_for_bit(mode, watch, tmp_path):
    callback = watch(every=3)
    _, bare = trained(MODES[mode], [], tmp_path)
    model, ours = trained(MODES[mode], [callback], tmp_path)
    assert_same(bare, ours, exact="xla" not in mode)  # XLA fuses a measured step in another way
    assert callback.report.errors == ()
    assert len(recorder_of(callback).sampled) >= (3 if mode == "accumulation" else 6)
    assert callback.report.steps == 18
    assert "train_step" not in vars(model)

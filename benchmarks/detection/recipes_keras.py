"""Healthy Keras recipes, on small real data."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from benchmarks.detection import data
from benchmarks.detection.setup import Book, Setup

BOOK = Book("keras")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def setup(split, model, criterion, **fields) -> Setup:
    """A setup with one input."""
    x, y, val_x, val_y = split
    return Setup(model, criterion, (x,), y, (val_x,), val_y, **fields)


def stack(shape, *parts, dtype: str = "float32"):
    """A Sequential model."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


@BOOK.add()
def mlp_digits(seed):
    model = stack((64,), layers.Dense(128, "relu"), layers.Dropout(0.2), layers.Dense(64, "relu"), layers.Dense(10, "softmax"))
    return setup(data.digits(seed), model, keras.losses.SparseCategoricalCrossentropy(), classes=10, epochs=6)


@BOOK.add()
def cnn_digits(seed):
    model = stack(
        (8, 8, 1), layers.Conv2D(16, 3, padding="same", activation="relu"), layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(), layers.Flatten(), layers.Dense(64, "relu"), layers.Dropout(0.3), layers.Dense(10),
    )  # fmt: skip
    return setup(data.digits(seed, (8, 8, 1)), model, LOGITS, classes=10, epochs=6)


@BOOK.add()
def batch_norm_cnn_digits(seed):
    def block(width):
        return [layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()]

    model = stack((8, 8, 1), *block(16), *block(32), layers.MaxPooling2D(), *block(32), layers.GlobalAveragePooling2D(), layers.Dense(10))
    fields = {"optimizer": "sgd", "rate": 0.05, "momentum": 0.9, "schedule": cosine}
    return setup(data.digits(seed, (8, 8, 1)), model, LOGITS, classes=10, batch=16, epochs=5, **fields)


def cosine(setup):
    """To zero over the whole run."""
    return keras.optimizers.schedules.CosineDecay(setup.rate, setup.steps)


def warm_cosine(setup):
    """Linear for 10 %, then a cosine."""
    warm = max(1, setup.steps // 10)
    return keras.optimizers.schedules.CosineDecay(setup.rate / 20, setup.steps - warm, warmup_target=setup.rate, warmup_steps=warm)


def decay_per_epoch(setup):
    """Nine tenths of the rate after each epoch."""
    return keras.optimizers.schedules.ExponentialDecay(setup.rate, setup.batches, 0.9, staircase=True)


@BOOK.add()
def wine_tanh(seed):
    model = stack((13,), layers.Dense(32, "tanh"), layers.Dense(32, "tanh"), layers.Dense(3, "softmax"))
    fields = {"optimizer": "sgd", "rate": 0.02, "momentum": 0.9}
    return setup(data.table("wine", seed), model, keras.losses.SparseCategoricalCrossentropy(), classes=3, batch=16, epochs=25, **fields)


@BOOK.add()
def diabetes(seed):
    model = stack((10,), layers.Dense(64, "relu"), layers.Dense(64, "relu"), layers.Dense(1), layers.Flatten(), layers.Reshape(()))
    return setup(data.table("diabetes", seed), model, keras.losses.MeanSquaredError(), kind="values", epochs=20, learnt=0.2)


@BOOK.add()
def breast_cancer(seed):
    regularizer = keras.regularizers.L2(1e-4)
    model = stack((30,), layers.Dense(32, "relu", kernel_regularizer=regularizer), layers.Dense(16, "relu"), layers.Dense(1, "sigmoid"))
    split = data.table("breast_cancer", seed)
    split = (split[0], split[1][:, None], split[2], split[3][:, None])
    return setup(split, model, keras.losses.BinaryCrossentropy(), kind="binary", optimizer="rmsprop", batch=32, epochs=14)


@BOOK.add()
def iris_wide_and_deep(seed):
    inputs = keras.Input((4,))
    deep = layers.Dense(24, "relu")(layers.Dense(24, "relu")(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Concatenate()([inputs, deep])))
    return setup(data.table("iris", seed), model, keras.losses.SparseCategoricalCrossentropy(), classes=3, rate=5e-3, batch=8, epochs=15)


@BOOK.add(origin="keras")
def lstm_authors(seed):
    model = stack((48,), layers.Embedding(len(data.alphabet()), 32), layers.LSTM(32), layers.Dense(1, "sigmoid"), dtype="int64")
    split = data.authors(seed)
    split = (split[0], split[1][:, None], split[2], split[3][:, None])
    return setup(split, model, keras.losses.BinaryCrossentropy(), kind="binary", rate=3e-3, epochs=5)


@BOOK.add(origin="keras")
def gru_characters(seed):
    letters = len(data.alphabet())
    model = stack((32,), layers.Embedding(letters, 48), layers.GRU(64, return_sequences=True), layers.Dense(letters), dtype="int64")
    return setup(data.characters(seed), model, LOGITS, kind="tokens", classes=letters, rate=5e-3, epochs=5, learnt=0.2)


@BOOK.add()
def text_convolutions_authors(seed):
    model = stack(
        (48,), layers.Embedding(len(data.alphabet()), 32), layers.Conv1D(48, 5, activation="relu"), layers.GlobalMaxPooling1D(),
        layers.Dense(32, "relu"), layers.Dense(2), dtype="int64",
    )  # fmt: skip
    return setup(data.authors(seed), model, LOGITS, classes=2, epochs=6)


@BOOK.add()
def transformer_characters(seed):
    letters = len(data.alphabet())
    ids = keras.Input((16,), dtype="int64")
    stream = layers.Embedding(letters, 48)(ids) + layers.Embedding(16, 48)(keras.ops.arange(16))
    normed = layers.LayerNormalization()(stream)
    stream = stream + layers.MultiHeadAttention(4, 12)(normed, normed, use_causal_mask=True)
    stream = stream + layers.Dense(48)(layers.Dense(96, "gelu")(layers.LayerNormalization()(stream)))
    model = keras.Model(ids, layers.Dense(letters)(layers.LayerNormalization()(stream)))
    fields = {"optimizer": "adamw", "rate": 3e-3, "clip": 1.0, "schedule": warm_cosine, "learnt": 0.12}
    return setup(data.characters(seed, 16), model, LOGITS, kind="tokens", classes=letters, epochs=6, **fields)


@BOOK.add()
def autoencoder_digits(seed):
    x, _, held, _ = data.digits(seed)
    model = stack((64,), layers.Dense(48, "relu"), layers.Dense(16, "relu"), layers.Dense(48, "relu"), layers.Dense(64, "sigmoid"))
    return setup((x, x, held, held), model, keras.losses.BinaryCrossentropy(), kind="images", epochs=8, rate=2e-3)


class Variational(keras.Model):
    """An auto-encoder with a sampled code; the divergence is added as a loss of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.code = layers.Dense(64, "relu"), layers.Dense(16)
        self.hidden, self.image = layers.Dense(64, "relu"), layers.Dense(64, "sigmoid")
        self.noise = keras.random.SeedGenerator(0)

    def call(self, x, training=False):
        mean, log_variance = keras.ops.split(self.code(self.encoder(x)), 2, axis=1)
        divergence = -0.5 * keras.ops.mean(keras.ops.sum(1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance), axis=1))
        self.add_loss(0.01 * divergence)
        drawn = keras.random.normal(keras.ops.shape(mean), seed=self.noise) * keras.ops.exp(0.5 * log_variance)
        return self.image(self.hidden(mean + drawn if training else mean))


@BOOK.add()
def vae_digits(seed):
    x, _, held, _ = data.digits(seed)
    model = Variational()
    model(x[:1])
    return setup((x, x, held, held), model, keras.losses.BinaryCrossentropy(), kind="images", epochs=8, rate=2e-3, learnt=0.2)


@BOOK.add()
def two_inputs_digits(seed):
    """Are two digits alike? One encoder for both."""
    x, y, held, held_y = data.digits(seed)
    generator = np.random.default_rng(seed)

    def couple(values, labels):
        first = generator.integers(0, len(values), len(values))
        alike = np.array([generator.choice(np.flatnonzero(labels == labels[index])) for index in first])
        second = np.where(generator.random(len(values)) < 0.5, alike, generator.integers(0, len(values), len(values)))
        return (values[first], values[second]), (labels[first] == labels[second]).astype(np.int64)[:, None]

    encoder = stack((64,), layers.Dense(96, "relu"), layers.Dense(32, "relu"))
    pair = keras.Input((64,)), keras.Input((64,))
    apart = keras.ops.abs(encoder(pair[0]) - encoder(pair[1]))
    model = keras.Model(pair, layers.Dense(1, "sigmoid")(apart))
    return Setup(
        model, keras.losses.BinaryCrossentropy(), *couple(x, y), *couple(held, held_y), kind="binary", rate=3e-3, epochs=8, learnt=0.35
    )  # fmt: skip


@BOOK.add()
def half_precision_digits(seed):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = stack((64,), layers.Dense(128, "relu"), layers.Dense(128, "relu"), layers.Dense(10, dtype="float32"))
    keras.mixed_precision.set_global_policy("float32")
    return setup(data.digits(seed), model, LOGITS, classes=10, epochs=5)


@BOOK.add()
def finetuned_head_digits(seed):
    x, y, held, held_y = data.digits(seed)
    trunk = stack((64,), layers.Dense(96, "relu"), layers.Dense(64, "relu"))
    first = keras.Sequential([trunk, layers.Dense(5)])
    first.compile(keras.optimizers.Adam(3e-3), LOGITS)
    first.fit(x[y < 5], y[y < 5], epochs=4, verbose=0)
    trunk.trainable = False
    return setup((x, y, held, held_y), keras.Sequential([trunk, layers.Dense(10)]), LOGITS, classes=10, epochs=6, rate=3e-3)


@BOOK.add()
def scheduled_cnn_digits(seed):
    model = stack(
        (8, 8, 1), layers.Conv2D(16, 3, padding="same"), layers.LayerNormalization(), layers.Activation("gelu"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same"), layers.LayerNormalization(), layers.Activation("gelu"), layers.Flatten(), layers.Dense(10),
    )  # fmt: skip
    return setup(data.digits(seed, (8, 8, 1)), model, LOGITS, classes=10, epochs=6, rate=2e-3, schedule=decay_per_epoch)

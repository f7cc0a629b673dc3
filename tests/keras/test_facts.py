"""What the rules are told about a Keras run before the numbers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.keras.recorder import recorder_of
from trainvet.integrations.keras.plan import Plan, function_of
from trainvet.integrations.keras.structure import shared

layers = keras.layers
RNG = np.random.default_rng(9)
X = RNG.standard_normal((24, 6)).astype("float32")
Y = (X @ np.ones((6, 1), "float32")).astype("float32")


def plan_of(model, x, y, watch, **fit):
    callback = watch(every=1)
    model.fit(x, y, **{"batch_size": 8, "verbose": 0, "callbacks": [callback], **fit})
    assert callback.report.errors == ()
    return recorder_of(callback).plans[-1]


def simple(optimizer="adam", loss="mse", units=1, **last):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="relu", name="a"), layers.Dense(units, name="b", **last)])
    model.compile(optimizer=optimizer, loss=loss)
    return model


def test_names_roles_and_depths(watch):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int32", name="tokens")
    hidden = layers.Embedding(9, 6, name="table")(tokens)
    hidden = layers.LayerNormalization(name="ln")(hidden + layers.MultiHeadAttention(2, 3, name="mha")(hidden, hidden))
    hidden = layers.GRU(4, name="gru")(hidden)
    gated = layers.Multiply(name="product")([layers.Dense(4, activation="sigmoid", name="gate")(hidden), hidden])
    normed = layers.ReLU(name="relu")(layers.BatchNormalization(name="bn")(layers.Dense(3, name="before")(gated)))
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2, activation="tanh", name="deep")], name="inner")
    model = keras.Model(tokens, layers.Dense(1, activation="sigmoid", name="out")(inner(normed)))
    model.compile(optimizer=keras.optimizers.AdamW(1e-3, weight_decay=0.02, beta_2=0.99), loss="binary_crossentropy")
    facts = plan_of(model, RNG.integers(0, 9, (24, 4)), (Y > 0).astype("float32"), watch)
    parameters = facts.parameters
    roles = {name: item.role for name, item in parameters.items()}
    assert roles["table.embeddings"] == "embedding"
    assert roles["ln.gamma"] == "norm"
    assert roles["before.bias"] == "bias-before-norm"
    assert roles["mha.query.bias"] == "bias"
    assert roles["out.kernel"] == "output"
    assert roles["gru.gru_cell.kernel"] == ""
    assert set(facts.of("buffer")) == {"bn.moving_mean", "bn.moving_variance"}
    seen = facts.of("activation")
    assert (seen["relu"].function, seen["gate"].function, seen["inner.deep"].function, seen["out"].function) == ("relu", "sigmoid", "tanh", "sigmoid")
    assert (seen["gate"].role, seen["out"].role, seen["gru"].role) == ("gate", "output", "gate")
    assert seen["relu"].shape == (8, 3)
    order = [
        parameters[name].depth for name in ("table.embeddings", "mha.query.kernel", "ln.gamma", "gru.gru_cell.kernel", "before.kernel", "out.kernel")
    ]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    optimizer = facts.optimizers[0]
    assert (optimizer.type, optimizer.family, optimizer.weight_decay, optimizer.betas) == ("AdamW", "adam", 0.02, (0.9, 0.99))
    assert optimizer.epsilon == pytest.approx(1e-7)
    assert set(optimizer.parameters) == {name for name, item in parameters.items() if item.trainable}
    assert {item.group for item in parameters.values()} == {"AdamW"}
    loss = facts.losses[0]
    assert (loss.name, loss.kind, loss.classes, loss.samples) == ("loss", "binary_cross_entropy", 2, 8)
    assert not facts.every_step
    assert facts.framework == "keras"


def test_length_schedule_and_clipping(watch):
    rate = keras.optimizers.schedules.CosineDecay(0.1, 30)
    facts = plan_of(simple(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.5)), X, Y, watch, epochs=4)
    assert facts.planned_steps == 12
    schedule = facts.schedules[0]
    assert (schedule.group, schedule.horizon, len(schedule.curve)) == ("SGD", 30.0, 12)
    assert schedule.curve[0] == pytest.approx(0.1)
    assert facts.clipping == 0.5
    assert (facts.optimizers[0].momentum, facts.optimizers[0].family) == (0.9, "sgd")


def test_the_rate_of_every_step(watch):
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    callback = watch(every=1000)
    model = simple(keras.optimizers.SGD(rate))
    model.fit(X, Y, batch_size=1, verbose=0, callbacks=[callback])
    history = callback.history("optimizer.learning_rate")
    np.testing.assert_allclose(history.values[:, 0], 0.1 * 0.5 ** (history.steps / 2), rtol=1e-5)


def test_a_rate_that_follows_a_metric(watch):
    callback = watch(every=1)
    plateau = keras.callbacks.ReduceLROnPlateau("loss")
    simple().fit(X, Y, batch_size=8, verbose=0, callbacks=[callback, plateau])
    assert recorder_of(callback).plans[-1].schedules[0].reactive


def test_a_run_that_starts_later(watch):
    facts = plan_of(simple(), X, Y, watch, epochs=5, initial_epoch=3)
    assert facts.planned_steps == 6
    assert not facts.resumed
    assert not facts.pretrained


LOSSES = {
    "sparse_categorical_crossentropy": ("cross_entropy", 3, 8, False),
    "smoothed": ("cross_entropy", 3, 8, True),
    "mean_absolute_error": ("unknown", 0, 8, False),
    "mse": ("regression", 0, 24, False),
    "own": ("unknown", 0, 8, False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, watch):
    known = {
        "smoothed": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "own": lambda y, p: keras.ops.mean((p - y) ** 2),
    }
    y = {"sparse_categorical_crossentropy": np.arange(24) % 3, "smoothed": np.eye(3)[np.arange(24) % 3]}.get(name, np.ones((24, 3), "float32"))
    loss = plan_of(simple(loss=known.get(name, name), units=3), X, y, watch).losses[0]
    assert (loss.kind, loss.classes, loss.samples, loss.weighted) == LOSSES[name]


def test_a_penalty_makes_the_loss_something_else(watch):
    assert plan_of(simple(kernel_regularizer="l2"), X, Y, watch).losses[0].kind == "unknown"


def test_precision(watch):
    for policy, name in (("float32", "32"), ("mixed_float16", "16-mixed"), ("mixed_bfloat16", "bf16-mixed"), ("bfloat16", "bf16-true")):
        keras.config.set_dtype_policy(policy)
        try:
            facts = plan_of(simple(), X, Y, watch)
        finally:
            keras.config.set_dtype_policy("float32")
        assert facts.precision == name
        assert facts.loss_scaler == (policy == "mixed_float16")
        if facts.loss_scaler:
            assert facts.growth_interval == 2000
            assert "run.loss_scale" not in facts.unobservable


def test_functions_of_layers():
    named = {
        layers.Dense(2): "",
        layers.Dense(2, activation="relu"): "relu",
        layers.Conv1D(2, 2, activation="silu"): "silu",
        layers.Activation("relu6"): "relu",
        layers.ReLU(negative_slope=0.1): "leaky_relu",
        layers.ReLU(): "relu",
        layers.LSTM(2): "",
        layers.SimpleRNN(2): "tanh",
        layers.Activation(keras.activations.gelu): "gelu",
        layers.Dropout(0.1): "",
    }
    assert {layer: function_of(layer) for layer in named} == named


def test_names_are_unique_and_a_shared_layer_is_there_once():
    same = layers.Dense(3, name="same")

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = same, layers.Dense(3, name="same"), same

        def call(self, x):
            return self.three(self.two(self.one(x)))

    model = Twice()
    model(np.ones((2, 3), "float32"))
    assert list(Plan(model).parameters) == ["same.kernel", "same.bias", "same#1.kernel", "same#1.bias"]


def test_a_layer_is_shared_where_it_is_fed_by_itself_and_not_where_two_inputs_meet_it():
    one, two = keras.Input((4,)), keras.Input((4,))
    encoder, repeated = layers.Dense(4, name="encoder"), layers.Dense(4, name="repeated")
    apart = layers.Subtract()([encoder(one), layers.ReLU()(encoder(layers.ReLU()(two)))])
    assert shared(Plan(keras.Model([one, two], apart))) == ()
    twice = repeated(layers.ReLU()(repeated(apart)))
    assert shared(Plan(keras.Model([one, two], twice))) == ("repeated = repeated#1",)

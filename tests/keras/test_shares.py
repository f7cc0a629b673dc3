"""Numbers that only some layers, precisions or watchpoints have, against what numpy makes of the same tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.recorder import Recorder, recorder_of
from trainvet.integrations.keras.host import clip_scale
from trainvet.integrations.keras.kernels import Sketch
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.structure import shared
from trainvet.integrations.keras.units import flat_below, softmax_numbers
from trainvet.meaning import share_inside

layers = keras.layers
RNG = np.random.default_rng(3)
X = RNG.standard_normal((16, 4)).astype("float32")
RANGES = [share_inside(target, low, high) for target, low, high in [("activation", 0.0, 0.0), ("activation", -1.0, 0.5), ("weight", -0.2, 0.3)]]
RANGES += [share_inside("output", 0.0, 9.0), share_inside("input", -1.0, 0.0)]


class Ranges(Recorder):
    reads = Recorder.reads | frozenset(RANGES)


def test_shares_inside_ranges(watch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="relu", name="a"), layers.Dense(2, name="b")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    callback = watch(every=1, rules=[Ranges()])
    model.fit(X, X[:, :2], batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.report.errors == ()
    snapshot = recorder_of(callback).sampled[0]
    hidden = model.layers[0](X).numpy()
    told = {key: dict(zip(*snapshot.column(key), strict=True)) for key in RANGES}
    assert told[RANGES[0]]["a"] == pytest.approx((hidden == 0).mean())
    assert told[RANGES[1]]["a"] == pytest.approx(((hidden >= -1) & (hidden <= 0.5)).mean())
    kernel = model.layers[0].kernel.numpy()
    assert told[RANGES[2]]["a.kernel"] == pytest.approx(((kernel >= -0.2) & (kernel <= 0.3)).mean())
    assert told[RANGES[2]]["b.bias"] == 1
    assert told[RANGES[3]]["output"] == pytest.approx((model(X).numpy() >= 0).mean())
    assert told[RANGES[4]]["input"] == pytest.approx(((X >= -1) & (X <= 0)).mean())


def test_padded_steps_are_in_no_share(watch):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int32")
    hidden = layers.Dense(3, activation="relu", name="a")(layers.Embedding(9, 3, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0]], "int32")
    inner = keras.Model(tokens, hidden)(ids).numpy()[ids > 0]
    callback = watch(every=1, rules=[Ranges()])
    model.fit(ids, np.ones((2, 1), "float32"), batch_size=2, verbose=0, callbacks=[callback])
    snapshot = recorder_of(callback).sampled[0]
    assert snapshot.values(RANGES[0], ("a",))[0] == pytest.approx((inner == 0).mean())
    assert snapshot.values(RANGES[1], ("a",))[0] == pytest.approx(((inner >= -1) & (inner <= 0.5)).mean())


@pytest.mark.parametrize(("axis", "width", "expected"), [(0, 5, 1.0), (0, 16, 0.0), (-1, 5, np.nan)])
def test_a_softmax_over_the_batch(axis, width, expected, watch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(width), layers.Softmax(axis=axis, name="s"), layers.Dense(2)])
    model.compile("sgd", "mse")
    callback = watch(every=1)
    model.fit(X, X[:, :2], batch_size=16, verbose=0, callbacks=[callback])
    column = recorder_of(callback).sampled[0].column("activation.batch_axis")
    seen = np.nan if column is None else dict(zip(*column, strict=True))["s"]
    np.testing.assert_equal(seen, expected)
    assert callback.report.errors == ()


def test_without_a_softmax_layer_its_axis_is_said_to_be_hidden(watch):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, activation="softmax")])
    model.compile("sgd", "mse")
    callback = watch(every=1)
    model.fit(X, X[:, :2], batch_size=16, verbose=0, callbacks=[callback])
    assert "Softmax" in recorder_of(callback).plans[-1].unobservable["activation.batch_axis"]


def test_entropy_and_largest_input_of_a_softmax():
    given = np.array([[0.0, 0, 0, 0], [5, 0, -np.inf, -np.inf], [9, -np.inf, -np.inf, -np.inf]], "float32")
    output = np.exp(given) / np.exp(given).sum(1, keepdims=True)
    found = softmax_numbers(layers.Softmax(), tf.constant(output), tf.constant(given), frozenset({"entropy", "input_abs_max"}))
    p = output[1, :2].astype(np.float64)
    assert float(found["entropy"]) == pytest.approx((1 - (p * np.log(p)).sum() / np.log(2)) / 2, rel=1e-5)  # one entry is no choice
    assert float(found["input_abs_max"]) == 9


def test_where_functions_are_flat():
    told = {}
    for name in ("relu", "leaky_relu", "elu", "selu", "gelu", "silu"):
        limit = flat_below(layers.Activation(name), name)
        function = keras.activations.get(name)
        told[name] = (limit.value, limit.of_input)
        if name in ("elu", "selu"):
            assert limit.value == pytest.approx(float(function(tf.constant(-3.0))), rel=1e-5)
    assert [told[name] for name in ("relu", "leaky_relu", "gelu", "silu")] == [(0, False), (0, False), (-3, True), (-6, True)]
    assert flat_below(layers.Dense(2, activation="gelu"), "gelu") is None  # what the function is given does not show
    assert flat_below(layers.ELU(alpha=2.0), "elu").value == pytest.approx(2 * np.expm1(-3.0))
    assert flat_below(layers.Activation("tanh"), "tanh") is None


def test_close_and_swallowed_updates():
    fine, stuck, half = (keras.Variable(np.ones(4, kind), dtype=kind) for kind in ("float32", "float32", "float16"))
    slopes = {"fine": tf.ones(4), "stuck": tf.ones(4), "half": tf.constant([1, 1, 0, 1], tf.float16)}
    sketch = Sketch({"fine": fine, "stuck": stuck, "half": half}, slopes, frozenset({"close", "swallowed", "abs_before", "abs_change"}))
    fine.assign_add([1e-3, 0, 0, 0])
    stuck.assign_add([5e-6] * 4)
    half.assign_add(np.array([1e-5, 1e-5, 0, 0.1], "float16"))
    found = sketch.compare()
    assert [bool(found[name]["close"]) for name in ("fine", "stuck", "half")] == [False, True, False]
    assert float(found["half"]["swallowed"]) == 2  # one has no slope, one has moved
    assert "swallowed" not in found["fine"]
    assert float(found["fine"]["abs_before"]) == 4
    assert float(found["fine"]["abs_change"]) == pytest.approx(1e-3, rel=1e-3)


def test_the_share_of_gradients_below_what_half_precision_holds(watch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="a")])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=4.0)
    model.compile(optimizer, "mse")
    x = np.tile(np.array([[1.0, 1e-6, 1e-7, 0.0]], "float32"), (8, 1))  # the gradient is -2 x, scaled -8 x
    callback = watch(every=1)
    model.fit(x, np.ones((8, 1), "float32"), batch_size=8, verbose=0, callbacks=[callback])
    assert recorder_of(callback).sampled[0].values("gradient.underflow_share", ("a.kernel",))[0] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("norms", "limit", "how", "expected"),
    [
        ([3.0, 4.0], 1.0, "norm", 0.2),
        ([3.0, 4.0], 9.0, "norm", 1.0),
        ([3.0, 4.0], 3.0, "each", np.sqrt(18) / 5),
        ([0.0, 0.0], 1.0, "norm", 1.0),
        ([3.0, np.inf], 1.0, "norm", None),
        ([3.0, 4.0], 1.0, "value", None),
        ([3.0, 4.0], None, "", None),
    ],
)
def test_how_much_clipping_takes(norms, limit, how, expected):
    found = clip_scale(np.array(norms), limit, how)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_a_layer_at_several_places():
    inputs = keras.Input((4,))
    twice, once = layers.Dense(4, name="twice"), layers.Dense(4, name="once")
    assert shared(Plan(keras.Model(inputs, once(twice(layers.ReLU()(twice(inputs))))))) == ("twice = twice#1",)

"""Abort and skip: a non-finite update does not reach the weights, running statistics stay good, and the run ends as the user asked."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from trainvet.action import TrainingAborted

layers = keras.layers
RNG = np.random.default_rng(6)
BAD = 5


def data(batches=12, size=8, bad=(BAD,)):
    x = RNG.standard_normal((batches * size, 6)).astype("float32")
    y = (x @ np.ones((6, 1), "float32")).astype("float32")
    for batch in bad:
        x[batch * size + 2, 1] = np.nan
    return x, y


class Own(keras.Model):
    """Built by its first step only."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training))


def make(unbuilt=False, optimizer=None, **compile_):
    keras.utils.set_random_seed(2)
    sequential = [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dense(1)]
    model = Own() if unbuilt else keras.Sequential(sequential)
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), loss="mse", **compile_)
    return model


def values(model):
    return [keras.ops.convert_to_numpy(variable).copy() for variable in [*model.variables, *model.optimizer.variables]]


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


MODES = {"graph": {}, "eager": {"run_eagerly": True}, "blocks": {"steps_per_execution": 4}, "unbuilt": {"unbuilt": True}}


@pytest.mark.parametrize(("mode", "every"), [("graph", 1), *((mode, 1000) for mode in MODES)])
def test_abort_leaves_the_weights_of_the_last_good_step(mode, every, watch):
    x, y = data(bad=(11,))
    good = make(**MODES[mode])
    good.fit(x[: 11 * 8], y[: 11 * 8], batch_size=8, shuffle=False, verbose=0)
    callback = watch(select=("NF101",), rules=(), every=every, abort_on="error")
    model = make(**MODES[mode])
    with pytest.raises(TrainingAborted) as caught:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    report = caught.value.report
    assert report.status == "aborted"
    assert report.findings[0].first_step == 11
    assert report.last_good_step == 10
    assert_equal(values(good), values(model))
    assert "train_step" not in vars(model)
    model.fit(x[:80], y[:80], batch_size=8, verbose=0)  # goes on without us
    assert len(callback.report.findings) == len(report.findings)


def test_the_checkpoint_from_before_the_fault_is_named(watch, tmp_path):
    x, y = data(bad=())

    class Spoil(keras.callbacks.Callback):
        """The fault comes in the third epoch."""

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.layers[0].bias.assign(np.full(8, np.nan))

    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    callbacks = [Spoil(), watch(select=("NF101",), rules=(), abort_on="error"), saved]
    model = make()
    with pytest.raises(TrainingAborted, match=r"2\.keras") as caught:
        model.fit(x[:32], y[:32], batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    assert caught.value.report.last_good_step == 7


def test_a_graceful_stop_ends_fit_in_the_ordinary_way(watch):
    x, y = data()
    callback = watch(select=("NF101",), rules=(), abort_on="error", abort="stop")
    ended = []

    class Last(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            ended.append(True)

    model = make()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=3, callbacks=[callback, Last()])
    assert ended == [True]
    assert callback.report.status == "aborted"
    assert callback.report.steps == BAD + 1
    assert all(np.isfinite(value).all() for value in values(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_update_is_dropped_and_the_run_goes_on(mode, watch):
    x, y = data(bad=(BAD,))
    callback = watch(select=("LR101",), rules=(), skip_bad_updates=1)
    model = make(**MODES[mode])
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.report.status == "finished"
    assert (callback.report.steps, callback.report.applied) == (12, 11)
    assert all(np.isfinite(value).all() for value in values(model))
    left_out = make(**MODES[mode])
    keep = np.r_[0 : BAD * 8, (BAD + 1) * 8 : len(x)]
    left_out.fit(x[keep], y[keep], batch_size=8, shuffle=False, verbose=0)
    for one, other in zip(values(left_out), values(model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert callback.history("run.skipped").steps.tolist() == [BAD]


def test_one_more_than_allowed_ends_the_run(watch):
    x, y = data(bad=(3, 7))
    callback = watch(select=("LR101",), rules=(), skip_bad_updates=1)
    model = make()
    with pytest.raises(TrainingAborted, match="no more bad updates"):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert callback.report.steps == 8
    assert all(np.isfinite(value).all() for value in values(model))


def test_a_loss_scaler_keeps_its_own_skipping(watch):
    """Its scale must fall on a bad step; only the running statistics are put back."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        make_one = lambda: make(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0))  # noqa: E731
        x, y = data(bad=(BAD,))
        model, bare = make_one(), make_one()
        callback = watch(select=("LS101",), rules=(), skip_bad_updates=3)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
        bare.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert float(model.optimizer.dynamic_scale) == float(bare.optimizer.dynamic_scale) == 512.0
    assert all(np.isfinite(value).all() for value in values(model))
    assert not all(np.isfinite(value).all() for value in values(bare))  # the running mean
    assert callback.report.applied == 11
    skipped = callback.history("run.skipped")
    assert skipped.steps[skipped.values[:, 0] > 0].tolist() == [BAD]


def test_without_abort_or_skip_nothing_is_held(watch):
    x, y = data()
    states = []
    for callbacks in ([], [watch(select=("NF101",), rules=())]):
        model = make()
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        states.append(values(model))
    assert_equal(*states)
    assert not all(np.isfinite(value).all() for value in states[1])

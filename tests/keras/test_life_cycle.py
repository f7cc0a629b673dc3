"""From construction to the end of a run, and what is left: repeated fits, exceptions, other callbacks, other data, recompiling."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.recorder import Recorder, recorder_of
from trainvet.callbacks import keras as ours

layers = keras.layers
RNG = np.random.default_rng(8)
X = RNG.standard_normal((40, 4)).astype("float32")
Y = (X @ np.ones((4, 1), "float32")).astype("float32")


def make(**compile_):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="relu", name="a"), layers.Dense(1, name="b")])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **compile_})
    return model


def assert_clean(model):
    assert "train_step" not in vars(model)
    assert "compute_loss" not in vars(model)
    assert "apply" not in vars(model.optimizer)
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    assert not hasattr(model.train_function, "hand_over")


def test_steps_go_on_over_epochs_and_fits(watch):
    model, callback = make(), watch(every=4)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    assert callback.report.steps == 10
    first = recorder_of(callback).snapshots
    assert [snapshot.batch for snapshot in first if snapshot.tables][:6] == [0, 1, 2, 3, 4, 0]
    built = callback._probe.stepper.steps
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    assert callback.report.steps == 20
    assert callback.report.applied == 20
    assert callback._probe.stepper.steps is built  # nothing is traced again
    steps = callback.history("loss.value").steps.tolist()
    assert steps == sorted(set(steps))
    assert steps == list(range(10, 20))
    assert_clean(model)


def test_a_custom_loop_over_epochs_resumes_with_a_fresh_callback(watch):
    model = make()
    model.fit(X, Y, batch_size=8, verbose=0)
    callback = watch()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    plan = recorder_of(callback).plans[-1]
    assert plan.resumed
    assert plan.pretrained


class Failing(keras.callbacks.Callback):
    def __init__(self, hook, error):
        super().__init__()
        setattr(self, hook, self.fail)
        self.error = error

    def fail(self, index, logs=None):
        if index == 2:
            raise self.error


@pytest.mark.parametrize(
    ("hook", "error"),
    [("on_train_batch_end", KeyboardInterrupt()), ("on_train_batch_begin", RuntimeError("no")), ("on_epoch_end", RuntimeError("no"))],
    ids=lambda value: str(value),
)
def test_an_exception_leaves_nothing_behind(hook, error, watch, tmp_path):
    model, callback = make(), watch(every=1)
    with pytest.raises(type(error)):
        model.fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=[callback, Failing(hook, error)])
    model.save(tmp_path / "model.keras")
    before = len(recorder_of(callback).snapshots)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert_clean(model)
    assert len(recorder_of(callback).snapshots) == before


def test_the_users_error_is_the_users_error(watch):
    model = make(loss=lambda y, p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch(every=1)])
    assert_clean(model)


def test_an_error_of_ours_ends_measuring_and_not_the_training(watch, monkeypatch):
    callback = watch(every=1)
    monkeypatch.setattr("trainvet.integrations.keras.journal.Journal.measured", lambda *args: 1 / 0)
    model = make()
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    monkeypatch.undo()
    assert history.history["loss"] == make().fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
    assert any("ZeroDivisionError" in error for error in callback.report.errors)
    assert_clean(model)


def test_a_fault_while_tracing_costs_one_kind_of_number(watch, monkeypatch):
    monkeypatch.setattr("trainvet.integrations.keras.kernels.Reducer.identical", lambda *args: 1 / 0)
    callback = watch(every=1)
    make().fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert len(callback.report.errors) == 2  # gradients and weights
    snapshot = recorder_of(callback).sampled[0]
    assert "update" in snapshot.tables
    assert "activation" in snapshot.tables
    assert "gradient" not in snapshot.tables


def test_switched_off(watch, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINVET", "off")
    callback = watch()
    make().fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert callback._session is None
    assert callback.report.steps == 0


def test_several_of_our_callbacks_share_one_probe(tmp_path):
    recorder = Recorder()
    first = ours.GradientWatch(log_dir=tmp_path, every=1)
    second = ours.WeightWatch(rules=[recorder])
    model = make()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[first, second])
    assert first._session is second._session
    assert second._probe is None
    codes = {item.code for item in second.report.coverage}
    assert "ZZ901" in codes
    assert not any(code.startswith("GR") for code in codes)
    assert any(item.code.startswith("GR") for item in first.report.coverage)
    with pytest.raises(ValueError, match="contradict"):
        model.fit(X, Y, verbose=0, callbacks=[ours.GradientWatch(log_dir=tmp_path), ours.WeightWatch(log_dir=tmp_path / "other")])
    model.fit(X, Y, batch_size=8, verbose=0)


def test_only_series_are_read_where_nothing_else_is_wanted(tmp_path):
    callback = ours.LearningRateSanity(log_dir=tmp_path)
    callback._selection.rules.clear()
    recorder = Recorder()
    recorder.__class__ = type("Series", (Recorder,), {"reads": frozenset({"loss.value"})})
    callback._selection.rules["ZZ901"] = recorder
    model = make()
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[callback])
    assert callback._probe.stepper.steps == {}
    assert callback.history("loss.value").steps.tolist() == list(range(15))


def test_checkpoints_and_validation_during_fit(watch, tmp_path):
    states = []
    for callbacks in ([], [watch(every=2)]):
        model = make()
        saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[*callbacks, saved])
        again = keras.saving.load_model(tmp_path / "2.keras")
        states.append((history.history, [keras.ops.convert_to_numpy(value) for value in again.weights]))
    assert states[0][0] == states[1][0]
    for one, other in zip(states[0][1], states[1][1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert callbacks[0].history("loss.value").steps.tolist() == list(range(10))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_generator_of_unknown_length(blocks, watch):
    def batches():
        for start in range(0, 40, 8):
            yield X[start : start + 8], Y[start : start + 8]

    states = []
    for callbacks in ([], [watch(every=2)]):
        signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
        model = make(steps_per_execution=blocks)
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        states.append((history.history, int(model.optimizer.iterations), [keras.ops.convert_to_numpy(value) for value in model.weights]))
    assert states[0][:2] == states[1][:2]
    for one, other in zip(states[0][2], states[1][2], strict=True):
        np.testing.assert_array_equal(one, other)
    assert callbacks[0].report.errors == ()
    assert callbacks[0].report.steps == 15
    assert len(recorder_of(callbacks[0]).sampled) >= 8


def test_blocks_that_an_epoch_cuts_short(watch):
    """Seven batches in blocks of three, the last one a smaller batch; after the dense start whole blocks run untouched."""
    x, y = np.concatenate([X, X])[:53], np.concatenate([Y, Y])[:53]
    states = []
    for callbacks in ([], [watch(every=1000)]):
        model = make(steps_per_execution=3)
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
        states.append([keras.ops.convert_to_numpy(value) for value in model.weights])
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)
    assert callbacks[0].report.steps == 28
    assert callbacks[0].history("loss.value").steps.tolist() == [2, 5, 6, 9, 12, 13, 16, 19, 20, 23, 26, 27]


def test_sample_and_class_weights_and_nested_inputs(watch):
    keras.utils.set_random_seed(4)
    left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
    model = keras.Model({"left": left, "right": right}, layers.Dense(2, activation="softmax", name="out")(layers.Concatenate()([left, right])))
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    callback = watch(every=1)
    data = {"left": X[:, :2], "right": X[:, 2:]}
    model.fit(data, (Y[:, 0] > 0).astype("int32"), sample_weight=np.ones(40), batch_size=8, verbose=0, callbacks=[callback])
    snapshot = recorder_of(callback).sampled[0]
    assert set(snapshot.tables["input"].names) == {"input.left", "input.right"}
    loss = recorder_of(callback).plans[-1].losses[0]
    assert (loss.kind, loss.classes, loss.samples, loss.weighted) == ("cross_entropy", 2, 8, True)


def test_compiling_again_between_fits_and_unfreezing(watch):
    model, callback = make(), watch(every=1)
    model.get_layer("a").trainable = False
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert recorder_of(callback).sampled[0].tables["gradient"].names == ("b.kernel", "b.bias")
    frozen = recorder_of(callback).plans[-1].parameters["a.kernel"]
    assert not frozen.trainable
    model.get_layer("a").trainable = True
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert recorder_of(callback).sampled[0].tables["gradient"].names == ("a.kernel", "a.bias", "b.kernel", "b.bias")
    assert recorder_of(callback).plans[-1].parameters["a.kernel"].trainable


def test_copies_and_pickles_carry_nothing_alive(watch):
    callback = watch(every=1)
    make().fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.report.steps == 5
        model = make()
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[twin])
        assert_clean(model)


def test_an_unknown_rule_is_an_error_at_construction():
    with pytest.raises(ValueError, match="dead-relu"):
        ours.Diagnostics(select=("dead-rely",))

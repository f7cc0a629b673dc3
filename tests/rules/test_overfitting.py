from __future__ import annotations

import numpy as np
import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.overfitting import Overfitting
from trainvet.statistics import Facts

WARN, INFO = Severity.WARNING, Severity.INFO
STEPS = 100  # between evaluations


def metric(values):
    return {STEPS * (index + 1) - 1: value for index, value in enumerate(values)}


def told(validation, training=None, accuracy=None, name="val_loss", facts=None):
    """Evaluations (counted from 1) and severities of what is found."""
    count = len(validation)
    metrics = {name: metric(validation)} | ({"val_acc": metric(accuracy)} if accuracy is not None else {})
    loss = np.linspace(2, 0.1, STEPS * count) if training is None else np.full(STEPS * count, training)
    found = findings(Overfitting(), {"loss.value": loss, "metric.value": metrics}, facts=facts)
    return [((item.step + 1) // STEPS, item.severity) for item in found]


FALL = [1.0, 0.8, 0.6, 0.5]


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        ([*FALL, 0.51, 0.52, 0.53, 0.535, 0.54], [(9, INFO)]),
        ([*FALL, 0.51, 0.512, 0.515, 0.518, 0.52], []),  # 4 %
        ([*FALL, 0.52, 0.54, 0.56, 0.58], []),  # four evaluations ago
        ([*FALL, 0.52, 0.54, 0.56, 0.58, 0.61], [(9, WARN)]),
        ([*FALL, 0.52, 0.54, 0.56, 0.58, 0.59, 0.595, 0.61, 0.7], [(9, INFO), (11, WARN)]),
        ([*FALL, 0.45, 0.4, 0.35, 0.3, 0.28], []),
        ([*FALL, 0.6, 0.4, 0.6, 0.45, 0.6, 0.38], []),
        ([0.001, 0.01, 1.0, 0.5, 0.001, 0.0012], []),
        ([*FALL, float("nan"), float("nan"), float("nan"), float("nan"), float("nan")], []),
    ],
)
def test_evaluations(validation, expected):
    assert told(validation) == expected


def test_near_zero_the_progress_counts():
    """From 1 down to 0.01: a tenth of a percent of the progress is no overfitting."""
    assert told([1.0, 0.1, 0.01, 0.0115, 0.0117, 0.0119, 0.012, 0.0121]) == []
    assert told([1.0, 0.1, 0.01, 0.012, 0.014, 0.016, 0.018, 0.021]) == [(8, WARN)]


def test_two_standard_errors():
    noise = [0.0, 0.2, -0.2, 0.2, -0.2, 0.2, -0.2, 0.2, -0.2, 0.2, 0.0]
    assert told([*FALL, *(0.75 + item for item in noise)]) == []


def test_only_while_the_training_loss_falls():
    rising = [*FALL, 0.52, 0.54, 0.56, 0.58, 0.61]
    assert told(rising, training=1.0) == []


def test_information_while_the_accuracy_is_still_at_its_best():
    rising = [*FALL, 0.52, 0.54, 0.56, 0.58, 0.65]
    better, worse = np.linspace(0.5, 0.9, 9), [0.5, 0.6, 0.7, 0.8, 0.79, 0.79, 0.78, 0.79, 0.79]
    assert told(rising, accuracy=better) == [(9, INFO)]
    assert told(rising, accuracy=worse) == [(9, WARN)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("val_loss", 1),
        ("validation/loss", 1),
        ("val_perplexity", 1),
        ("loss", 0),
        ("train_loss", 0),
        ("val_acc", 0),
        ("val_foo", 0),
        ("test_loss", 0),
    ],
)
def test_only_metrics_of_validation_data_for_which_lower_is_better(name, count):
    assert len(told([*FALL, 0.52, 0.54, 0.56, 0.58, 0.61], name=name)) == count


def test_the_advice_names_the_step():
    rising = {"metric.value": {"val_loss": metric([*FALL, 0.52, 0.54, 0.56, 0.58, 0.61])}, "loss.value": np.linspace(2, 0.1, 900)}
    (found,) = findings(Overfitting(), rising)
    assert (found.first_step, found.where) == (399, "val_loss")
    assert found.fixes[0] == "stop at step 399: EarlyStopping('val_loss', patience=3)"
    (found,) = findings(Overfitting(), rising, facts=Facts("keras"))
    assert "restore_best_weights" in found.fixes[0]


def test_missing_evidence_is_said():
    rule = Overfitting()
    assert rule.missing() == "no validation loss was reported"
    drive(rule, snapshots({"metric.value": {"val_loss": metric(FALL)}}))
    assert rule.missing() == "4 of 6 evaluations"
    drive(rule, snapshots({"metric.value": {"val_loss": metric(FALL)}}))
    assert rule.missing() == ""


@pytest.mark.parametrize(("between", "epoch", "count"), [(9, None, 0), (10, None, 1), (10, 51, 0), (10, 50, 1)])
def test_fifty_steps_and_an_epoch_after_the_best(between, epoch, count):
    """Several evaluations within an epoch say little: the training loss is the same one."""
    values = [*FALL, 0.52, 0.54, 0.56, 0.58, 0.65]
    written = {between * (index + 1) - 1: value for index, value in enumerate(values)}
    tracks = {"loss.value": np.linspace(2, 0.1, between * len(values)), "metric.value": {"val_loss": written}}
    assert len(findings(Overfitting(), tracks, facts=Facts(batches_per_epoch=epoch))) == count

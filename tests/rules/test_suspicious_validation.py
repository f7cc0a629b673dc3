from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.suspicious_validation import SuspiciousValidation
from trainvet.statistics import Facts, Layer

PLAIN = Facts(layers=(Layer("a", kind="linear"), Layer("off", kind="dropout", rate=0.0)))


def told(validation, training, facts=PLAIN, names=("val_loss", "loss")):
    found = findings(SuspiciousValidation(), {"metric.value": dict(zip(names, (validation, training), strict=True))}, facts=facts)
    return [(item.step, item.severity) for item in found]


INFO = Severity.INFO
ACCURACY = ("val/acc", "train/accuracy")


@pytest.mark.parametrize(
    ("validation", "training", "names", "steps"),
    [
        ([1.0, 0.9, 0.8, 0.7], [2.0, 1.5, 1.2, 1.0], ("val_loss", "loss"), [2]),
        ([1.0, 0.9, 0.8, 0.7], [2.0, 1.01, 0.91, 0.81], ("val_loss", "loss"), []),  # 1 %
        ([1.0, 0.9, 0.8, 0.7], [2.0, 1.03, 0.93, 0.9], ("val_loss", "loss"), [2]),  # 3 %
        ([1.0, 0.9, 0.8, 0.7], [2.0, 1.1, 0.8, 1.1], ("val_loss", "loss"), []),  # not twice in a row
        ([0.5, 0.6, 0.7], [0.4, 0.48, 0.56], ACCURACY, [2]),
        ([0.5, 0.6, 0.7], [0.4, 0.52, 0.62], ACCURACY, []),
        ([0.995, 0.996], [0.9, 0.98], ACCURACY, [0]),
        ([0.985, 0.986], [0.9, 0.98], ACCURACY, []),
        ([0.995, 0.996], [0.96, 0.98], ACCURACY, []),
        ([1.0, 0.9, 0.8], [2.0, 1.5, 1.2], ("val_loss", "accuracy"), []),
        ([float("nan")] * 4, [1.0] * 4, ("val_loss", "loss"), []),
    ],
)
def test_better_than_the_training_after_it(validation, training, names, steps):
    assert told(validation, training, names=names) == [(step, INFO) for step in steps]


def test_three_standard_errors():
    noisy = [1.3, 0.7, 1.3, 1.3, 1.3, 0.7, 1.3, 0.6, 0.6, 0.6, 0.6, 0.6]
    assert told(noisy, [1.0] * 12) == []
    assert told([1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 0.6, 0.6, 0.6], [1.0] * 9) == [(8, INFO)]


@pytest.mark.parametrize(
    "facts",
    [Facts(), Facts(layers=(Layer("drop", kind="dropout", rate=0.1),)), Facts(layers=PLAIN.layers, augmented=True)],
)
def test_quiet_where_training_may_be_harder(facts):
    assert told([1.0, 0.9, 0.8, 0.7], [2.0, 1.5, 1.2, 1.0], facts) == []
    rule = SuspiciousValidation()
    list(rule.begin(facts))
    assert rule.missing()


def test_missing_evidence_is_said():
    rule = SuspiciousValidation()
    assert rule.missing() == "the layers are not known"
    drive(rule, snapshots({"metric.value": {"val_loss": [1.0, 0.9], "loss": [2.0, 0.9]}}), PLAIN)
    assert rule.missing() == "2 of 3 evaluations beside a training metric"
    drive(rule, snapshots({"metric.value": {"val_loss": [1.0], "loss": [2.0]}}), PLAIN)
    assert rule.missing() == ""

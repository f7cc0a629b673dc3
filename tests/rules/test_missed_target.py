from __future__ import annotations

import json

import pytest

from tests.series import drive, plain, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.missed_target import MissedTarget
from trainvet.statistics import Facts

WARN, INFO = Severity.WARNING, Severity.INFO


def told(expect, **metrics):
    rule, other = MissedTarget(), MissedTarget()
    facts = Facts(expect=expect)
    assert drive(rule, snapshots({"metric.value": metrics} if metrics else {"loss.value": "1"}), facts) == []
    found = list(rule.end(90))
    list(other.begin(facts))
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert plain(other.end(90)) == plain(found)
    for item in found:
        well_worded(item)
    return found


@pytest.mark.parametrize(
    ("expect", "metrics", "severities"),
    [
        ({"val_acc": 0.92}, {"val_acc": [0.5, 0.91]}, [WARN]),
        ({"val_acc": 0.92}, {"val_acc": [0.5, 0.92]}, []),
        ({"val_acc": 0.92}, {"val_acc": [0.5, 0.93, 0.91]}, [INFO]),
        ({"val_loss": 0.3}, {"val_loss": [0.5, 0.31]}, [WARN]),
        ({"val_loss": 0.3}, {"val_loss": [0.5, 0.29]}, []),
        ({"val_acc": 0.92}, {"val/accuracy": [0.5, 0.91]}, [WARN]),
        ({"val_acc": 0.92}, {"val_accuracy": [0.5, 0.95]}, []),
        ({"val_acc": 0.92}, {"accuracy": [0.5, 0.95]}, [INFO]),  # never reported
        ({"val_acc": 0.92}, {}, [INFO]),
        ({"val_acc": 0.92}, {"val_acc": [float("nan")] * 3}, [WARN]),
        ({"val_acc": 0.9, "val_loss": 0.1}, {"val_acc": [0.5], "val_loss": [0.5]}, [WARN, WARN]),
        ({"val_speed": 3.0}, {"val_speed": [0.5]}, []),  # more or less?
        ({}, {"val_acc": [0.1]}, []),
    ],
)
def test_what_is_expected(expect, metrics, severities):
    assert [item.severity for item in told(expect, **metrics)] == severities


def test_what_is_said():
    (missed,) = told({"val_acc": 0.92}, val_acc=[0.5, 0.91, 0.9])
    assert missed.message == "val_acc is 0.9 at the end, 0.91 at its best (step 1); 0.92 was expected"
    (lost,) = told({"val_acc": 0.92}, val_acc=[0.5, 0.93, 0.91])
    assert lost.fixes == ("keep the weights of step 1: a checkpoint that follows val_acc",)
    (unknown,) = told({"val_acc": 0.92}, accuracy=[0.5], loss=[1.0])
    assert unknown.fixes == ("expect one of the metrics that were reported: accuracy, loss",)


def test_missing_evidence_is_said():
    rule = MissedTarget()
    assert rule.missing() == "nothing is expected: expect={'val_acc': 0.92}"
    list(rule.begin(Facts(expect={"val_speed": 1.0})))
    assert rule.missing() == "whether more or less is better is not known of val_speed"
    list(rule.begin(Facts(expect={"val_acc": 1.0})))
    assert rule.missing() == ""

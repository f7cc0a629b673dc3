from __future__ import annotations

import math

import pytest

from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.wrong_initial_loss import WrongInitialLoss
from trainvet.statistics import Facts, Loss

WARN, INFO = Severity.WARNING, Severity.INFO


def known(kind="cross_entropy", classes=10, samples=64, **more):
    return Facts(losses=(Loss("loss", kind, classes, samples, **more),))


def told(written, facts, squares=None, **more):
    columns = {"label.mean_square": {"label": squares}} if squares is not None else None
    return findings(WrongInitialLoss(), {"loss.value": written, **more}, columns, facts)


# classes, first losses, what is told: ln 10 = 2.303, ln 2 = 0.693, ln 1000 = 6.908
CASES = [
    (10, "2.3 x2", None),
    (10, "4.28 x2", None),
    (10, "4.32 x2", WARN),
    (10, "2.3, 900", None),  # the second step ran away: that is no initial loss
    (10, "4.32, 2.3", None),
    (10, "1.2 x2", None),
    (10, "1.1 x2", INFO),
    (10, "2.3, 0.01", None),  # learnt at once
    (10, "147 x2", INFO),  # 64 ln 10
    (10, "110 x2", WARN),
    (2, "0.7 x2", None),
    (2, "2.6 x2", None),
    (2, "2.8 x2", WARN),
    (2, "0.36 x2", None),
    (2, "0.3 x2", INFO),
    (1000, "6.9 x2", None),
    (1000, "8.95 x2", WARN),
    (1000, "3.4 x2", INFO),
]


@pytest.mark.parametrize(("classes", "written", "severity"), CASES)
def test_cross_entropy(classes, written, severity):
    found = told(written, known(classes=classes))
    assert [(item.severity, item.step, item.first_step) for item in found] == ([(severity, 1, 0)] if severity else [])


@pytest.mark.parametrize(("written", "severity"), [("0.7 x2", None), ("2.6 x2", None), ("2.8 x2", WARN)])
def test_binary_cross_entropy(written, severity):
    assert [item.severity for item in told(written, known("binary_cross_entropy", 2))] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("loss", "square", "severity"),
    [
        (1.0, 1.0, None),
        (0.31, 1.0, None),
        (2.9, 1.0, None),
        (0.29, 1.0, INFO),
        (3.1, 1.0, INFO),
        (99, 1.0, INFO),
        (101, 1.0, WARN),
        (1e-4, 1e-4, None),
        (64, 1.0, INFO),
        (1.0, 0.0, None),
    ],
)
def test_squared_error(loss, square, severity):
    found = told([loss] * 3, known("regression", 0), [square] * 3)
    assert [item.severity for item in found] == ([severity] if severity else [])


def test_without_the_targets_a_squared_error_is_not_judged():
    assert told("500 x3", known("regression", 0)) == []
    two = {"label.mean_square": {"a": [1.0] * 3, "b": [1.0] * 3}}
    assert findings(WrongInitialLoss(), {"loss.value": "500 x3"}, two, known("regression", 0)) == []


def test_a_summed_loss_is_information_and_is_judged_per_sample():
    (found,) = told("147 x2", known(reduction="sum"))
    assert found.severity == INFO
    assert "summed over 64 samples" in found.message
    assert found.evidence["loss"] == pytest.approx(147 / 64)
    assert told("400 x2", known(reduction="sum"))[0].severity == WARN


def test_128_samples_are_needed():
    assert [step for step, _ in run(WrongInitialLoss(), {"loss.value": "9 x20"}, facts=known(samples=16))] == [7]
    assert run(WrongInitialLoss(), {"loss.value": "9 x7"}, facts=known(samples=16)) == []
    assert run(WrongInitialLoss(), {"loss.value": "9 x1"}, facts=known(samples=500)) == [(0, "LO108")]


def test_batches_too_small_for_128_samples_in_ten_steps_are_not_judged():
    rule = WrongInitialLoss()
    assert drive(rule, snapshots({"loss.value": "9 x300"}), known(samples=12)) == []
    assert rule.missing() == "128 samples within 10 steps"
    assert run(WrongInitialLoss(), {"loss.value": "9 x300"}, facts=known(samples=13)) == [(9, "LO108")]


def test_told_once():
    assert len(told("9 x500", known())) == 1


QUIET = {
    "resumed": Facts(losses=known().losses, resumed=True),
    "pretrained": Facts(losses=known().losses, pretrained=True),
    "weighted": known(weighted=True),
    "composed": known("unknown"),
    "no reduction": known(reduction="none"),
    "number of classes unknown": known(classes=0),
    "another loss": Facts(losses=(Loss("other", "cross_entropy", 10, 64),)),
    "unknown": Facts(),
}


@pytest.mark.parametrize("facts", QUIET.values(), ids=QUIET.keys())
def test_quiet_where_the_normal_loss_is_not_known(facts):
    rule = WrongInitialLoss()
    assert told("9 x20", facts) == []
    drive(rule, snapshots({"loss.value": "9 x20"}), facts)
    assert "not judged" in rule.missing()


def test_the_kind_of_loss_may_become_known_later():
    rule = WrongInitialLoss()
    run = snapshots({"loss.value": "9 x30"}, block=5)
    assert drive(rule, run[:2]) == []
    list(rule.begin(known()))
    assert [item.step for snapshot in run[2:] for item in rule.check(snapshot)] == [1]


def test_each_loss_by_itself():
    facts = Facts(losses=(Loss("loss of optimizer 0", "cross_entropy", 10, 64), Loss("loss of optimizer 1", "cross_entropy", 10, 64)))
    both = {"loss.value": {"loss of optimizer 0": "2.3 x5", "loss of optimizer 1": "9 x5"}}
    assert [item.where for item in findings(WrongInitialLoss(), both, facts=facts)] == ["loss of optimizer 1"]


def test_the_advice_holds_the_factor():
    """Excess 8 = s²/2: logits of standard deviation 4."""
    (found,) = told([math.log(10) + 8] * 2, known())
    assert found.fixes[1] == "scale the initial weights of the last layer by about 0.2"
    assert "guessing among 10 classes gives 2.3" in found.message
    assert told("400 x2", known("regression", 0), [1.0] * 2)[0].fixes[1] == "scale the initial weights of the last layer by about 0.05"


def test_missing_evidence_is_said():
    rule = WrongInitialLoss()
    assert rule.missing() == "the first losses"
    drive(rule, snapshots({"loss.value": "2.3 x5"}), known())
    assert rule.missing() == ""


def scaled(std, mean=0.0):
    columns = {"input.std": {"input": [std] * 3}, "input.mean": {"input": [mean] * 3}}
    return findings(WrongInitialLoss(), {"loss.value": [math.log(10) + 8] * 3}, columns, known(output_layer="net.head"))[0]


@pytest.mark.parametrize(
    ("std", "mean", "weights"),
    [(1.0, 0.0, True), (0.06, 0.0, True), (4.9, 0.0, True), (0.04, 0.0, False), (5.1, 0.0, False), (1.0, 5.1, False), (float("nan"), 0.0, False)],
)
def test_where_the_inputs_are_normalised_it_is_the_weights(std, mean, weights):
    found = scaled(std, mean)
    scale = "scale the initial weights of net.head by about 0.2"
    assert found.fixes[0] == (scale if weights else "normalise the inputs")
    assert scale in found.fixes
    assert ("inputs that are not normalised" in found.causes) is not weights

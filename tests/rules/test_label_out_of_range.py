from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.label_out_of_range import LabelOutOfRange
from trainvet.statistics import Facts, Loss

BINARY = Facts(losses=(Loss("loss", "binary_cross_entropy", 2, 32),))
TEN = Facts(losses=(Loss("loss", "cross_entropy", 10, 32),))


def labels(outside, low, high, **more):
    return {f"label.{key}": {"label": value} for key, value in {"out_of_range": outside, "min": low, "max": high, **more}.items()}


@pytest.mark.parametrize(
    ("facts", "low", "high", "fix"),
    [
        (BINARY, 1, 2, "subtract 1 from the labels: the loss counts from 0"),
        (BINARY, -1, 1, "bring the labels into 0 to 1 (now -1 to 1)"),
        (TEN, 1, 10, "subtract 1 from the labels: the loss counts from 0"),
        (TEN, 0, 11, "give the last layer at least 12 outputs (it has 10)"),
        (TEN, -1, 9, "bring the labels into 0 to 9 (now -1 to 9)"),
    ],
)
def test_labels_outside_are_an_error_with_the_fix_that_fits(facts, low, high, fix):
    (found,) = findings(LabelOutOfRange(), None, labels([0, 3, 3], [low] * 3, [high] * 3), facts)
    assert (found.code, found.step, found.severity, found.fixes[0]) == ("IN103", 1, Severity.ERROR, fix)


def test_labels_inside_are_quiet():
    assert run(LabelOutOfRange(), None, labels([0] * 9, [0] * 9, [9] * 9), TEN) == []


@pytest.mark.parametrize(
    ("classes", "seen", "facts", "expected"),
    [
        ([1] * 4, [100, 300, 499, 499], TEN, []),
        ([1] * 4, [100, 300, 499, 500], TEN, [(3, "IN103")]),
        ([1, 1, 2, 2], [100, 300, 500, 900], TEN, []),
        ([1] * 4, [900] * 4, Facts(), []),
        ([float("nan")] * 4, [900] * 4, TEN, []),
    ],
)
def test_one_class_only(classes, seen, facts, expected):
    assert run(LabelOutOfRange(), None, labels([0] * 4, [0] * 4, [0] * 4, classes=classes, seen=seen), facts) == expected


def test_what_is_missing():
    assert LabelOutOfRange().missing() == "a sampled batch with labels of a loss that is known"

from __future__ import annotations

import pytest

from tests.series import well_worded
from trainvet.finding import Severity
from trainvet.rules.questionable_structure import QuestionableStructure
from trainvet.statistics import Facts, Layer

NORM = Layer("norm", "BatchNorm1d", "batch_norm", after=("before",))


@pytest.mark.parametrize(
    ("layers", "message", "where"),
    [
        ((Layer("before", "Linear", "linear", bias=True), NORM), "a bias in front of a batch normalisation", "before"),
        ((Layer("before", "Conv2d", "convolution", bias=True), NORM), "a bias in front of a batch normalisation", "before"),
        ((Layer("before", "Dropout", "dropout", rate=0.2), NORM), "dropout in front of a batch normalisation", "before"),
        ((Layer("drop", "Dropout", "dropout", rate=0.51),), "a dropout rate above 0.5", "drop"),
    ],
)
def test_habits_are_information(layers, message, where):
    rule = QuestionableStructure()
    (found,) = rule.begin(Facts(layers=layers))
    assert (found.code, found.severity, found.message, found.where) == ("MO106", Severity.INFO, message, where)
    well_worded(found)
    assert list(rule.begin(Facts(layers=layers))) == []


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (Layer("before", "Linear", "linear"), NORM),
        (Layer("before", "Dense", "linear", bias=True, function="relu"), NORM),
        (Layer("before", "Linear", "linear", bias=True), Layer("norm", "BatchNorm1d", "batch_norm")),
        (Layer("drop", "Dropout", "dropout", rate=0.5),),
        (Layer("before", "Dropout", "dropout", rate=0.0), NORM),
    ],
)
def test_quiet(layers):
    assert list(QuestionableStructure().begin(Facts(layers=layers))) == []

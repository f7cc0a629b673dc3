from __future__ import annotations

import dataclasses

import pytest

from tests.series import well_worded
from trainvet.rules.missing_nonlinearity import MissingNonlinearity
from trainvet.statistics import Facts, Layer

ONE = Layer("one", "Linear", "linear", width_in=16, width_out=32, trainable=True)
TWO = Layer("two", "Linear", "linear", width_in=32, width_out=8, trainable=True, after=("one",))
DROP = Layer("drop", "Dropout", "dropout", rate=0.1, after=("one",))


def change(layer, **fields):
    return dataclasses.replace(layer, **fields)


def told(*layers):
    return [(item.code, item.subjects) for item in MissingNonlinearity().begin(Facts(layers=layers))]


@pytest.mark.parametrize(
    "layers",
    [
        (ONE, TWO),
        (ONE, DROP, change(TWO, after=("drop",))),
        (change(ONE, width_out=16), change(TWO, width_in=16, width_out=32)),
        (change(ONE, kind="convolution", type="Conv2d"), change(TWO, kind="convolution", type="Conv2d")),
    ],
)
def test_two_linear_layers_in_a_row(layers):
    assert told(*layers) == [("MO107", ("one",))]


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (ONE,),
        (ONE, change(TWO, after=())),
        (change(ONE, function="relu"), TWO),
        (change(ONE, width_out=4), change(TWO, width_in=4)),  # a factorisation
        (change(ONE, trainable=False), TWO),
        (ONE, change(TWO, trainable=False)),
        (change(ONE, kind="embedding"), TWO),
        (change(ONE, kind="convolution", type="DepthwiseConv2D"), change(TWO, kind="convolution", type="Conv2D")),
        (ONE, change(ONE, name="norm", kind="norm", after=("one",)), change(TWO, after=("norm",))),
        (ONE, change(TWO, after=("one", "other"))),
        (ONE, change(TWO, name="query"), change(TWO, name="key")),  # a projection into a stream that several layers read
    ],
)
def test_quiet(layers):
    assert told(*layers) == []


def test_each_pair_once_and_words():
    rule = MissingNonlinearity()
    assert rule.missing() == "the layer graph"
    (found,) = rule.begin(Facts(layers=(ONE, TWO)))
    well_worded(found)
    assert found.fixes[0] == "put an activation behind one, such as ReLU"
    assert list(rule.begin(Facts(layers=(ONE, TWO)))) == []
    assert rule.missing() == ""

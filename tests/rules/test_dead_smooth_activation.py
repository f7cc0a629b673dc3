from __future__ import annotations

import dataclasses

import pytest

from tests.rules.test_dead_relu import columns, window
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.dead_smooth_activation import DeadSmoothActivation
from trainvet.statistics import Facts, Subject

SITE = Subject("act", "activation", "act", "GELU", depth=3, shape=(32, 64), function="gelu")


def plan(**changes):
    return Facts(framework="none", subjects=(dataclasses.replace(SITE, **changes),))


def told(layer, facts=None):
    return [(item.step, item.severity) for item in findings(DeadSmoothActivation(), None, columns(act=layer), facts or plan())]


# windows of 5 batches of 200 close at samples 4, 9, 14, ...


@pytest.mark.parametrize("function", ["gelu", "silu", "elu", "selu"])
@pytest.mark.parametrize(("dead", "expected"), [(0.89, []), (0.91, [(4, Severity.ERROR)])])
def test_more_than_ninety_percent_from_the_start(function, dead, expected):
    assert told(window([dead] * 9, batch=200), plan(function=function)) == expected


@pytest.mark.parametrize(("first", "later", "fires"), [(0.1, 0.49, 0), (0.1, 0.51, 1), (0.41, 0.6, 0), (0.39, 0.6, 1), (0.75, 0.75, 0)])
def test_more_than_half_and_grown(first, later, fires):
    assert told(window([first] * 5 + [later] * 10, batch=200)) == [(9, Severity.WARNING)] * fires


@pytest.mark.parametrize("function", ["leaky_relu", "prelu"])
@pytest.mark.parametrize(("dead", "expected"), [(0.94, []), (0.96, [(4, Severity.INFO)])])
def test_leaky_units_cannot_die(function, dead, expected):
    assert told(window([dead] * 9, batch=200), plan(function=function)) == expected
    assert told(window([0.1] * 5 + [0.9] * 10, batch=200), plan(function=function)) == []


@pytest.mark.parametrize("change", [{"role": "gate"}, {"role": "expert"}, {"function": "relu"}, {"function": ""}])
def test_exempt(change):
    assert told(window([1.0] * 20, batch=200), plan(**change)) == []


def test_a_largest_output_below_zero_is_no_proof():
    """GELU gives at most 0 for inputs between -3 and 0 too."""
    assert told(window([0.1] * 9, batch=200, top=[-0.1] * 9)) == []


def test_too_few_positions_and_nan_give_no_verdict():
    assert told(window([1.0] * 4, batch=5000)) == []
    assert told(window([float("nan")] * 9, batch=200)) == []


def test_words_and_fixes():
    rate = {"optimizer.learning_rate": "0.5 x10"}
    (found,) = findings(DeadSmoothActivation(), rate, columns(act=window([0.1] * 5 + [1.0] * 5, batch=200)), plan())
    assert found.message == "100% of the units were always below -3, where the slope is almost 0, in 1000 positions of several batches (act)"
    assert found.fixes[0] == "set the learning rate to about 0.05 (now 0.5)"
    assert run(DeadSmoothActivation(), rate, columns(act=window([1.0] * 9, batch=200)), plan()) == [(4, "AC102")]


def test_coverage_says_what_is_missing():
    rule = DeadSmoothActivation()
    drive(rule, snapshots(None, columns(act=window([0.1] * 4, batch=200))), plan())
    assert rule.missing() == "a window of 5 batches and 300 positions"
    rule.begin(plan(function="relu"))
    assert rule.missing().startswith("no GELU")
    for function in ("gelu", "prelu"):
        rule = DeadSmoothActivation()
        drive(rule, snapshots(None, columns(act=window([0.1] * 5, batch=200))), plan(function=function))
        assert rule.missing() == ""

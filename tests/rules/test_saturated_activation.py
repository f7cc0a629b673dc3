from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.saturated_activation import SaturatedActivation
from trainvet.statistics import Facts, Subject

SITE = Subject("act", "activation", "act", "Tanh", depth=3, shape=(32, 64), function="tanh")
FIRST = dataclasses.replace(SITE, name="first", depth=1, function="sigmoid")
PLAN = Facts(framework="none", subjects=(SITE, FIRST))


def told(written, facts=PLAN):
    found = findings(SaturatedActivation(), None, {"activation.saturated_share": {"act": written}}, facts)
    return [(item.step, item.severity) for item in found]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.49, []), (0.51, [(4, Severity.WARNING)]), (0.89, [(4, Severity.WARNING)]), (0.91, [(4, Severity.ERROR)])]
)
def test_limits_and_the_fifth_sample(share, expected):
    assert told([share] * 9) == expected
    assert told([share] * 4) == []


def test_five_samples_in_a_row():
    assert told([0.8, 0.8, 0.8, 0.8, 0.45] * 4) == []


def test_told_again_only_after_it_came_back_below_forty_percent():
    assert len(told("0.8 x6, 0.41, 0.8 x6")) == 1
    assert len(told("0.8 x6, 0.39, 0.8 x6")) == 2


def test_a_warning_may_grow_into_one_error():
    assert told("0.8 x6, 0.95 x9") == [(4, Severity.WARNING), (10, Severity.ERROR)]


@pytest.mark.parametrize("role", ["gate", "output"])
def test_gates_and_output_layers_are_info_only(role):
    facts = dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, role=role),))
    assert told("0.99 x20", facts) == [(4, Severity.INFO)]


@pytest.mark.parametrize("function", ["relu", "gelu", ""])
def test_other_functions_are_not_judged(function):
    assert told("1 x9", dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, function=function),))) == []


def test_layers_are_told_together_upstream_first():
    both = {"activation.saturated_share": {"act": "0.8 x9", "first": "0.7 x9"}}
    (finding,) = findings(SaturatedActivation(), None, both, PLAN)
    assert finding.subjects == ("first", "act")
    assert "80% of the elements" in finding.message
    assert run(SaturatedActivation(), None, {"activation.saturated_share": {"act": "0.8 x9", "unknown": "1 x9"}}, PLAN) == [(4, "AC103")]


def test_nan_gives_no_verdict_and_coverage_says_what_is_missing():
    assert told([float("nan")] * 9) == []
    rule = SaturatedActivation()
    assert rule.missing() == "0 of 5 samples"
    rule.begin(dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, function="relu"),)))
    assert rule.missing() == "no sigmoid or tanh layer was seen"

from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.near_overflow import NearOverflow
from trainvet.statistics import Facts, Subject

SITE = Subject("act", "activation", "act", "Linear", depth=1, shape=(4, 8), dtype="float16")
PLAN = Facts(framework="none", subjects=(SITE,))


def told(top, facts=PLAN):
    found = findings(NearOverflow(), None, {"activation.abs_max": {"act": top}}, facts)
    return [(item.step, item.first_step, item.severity) for item in found]


@pytest.mark.parametrize(("top", "fires"), [("30000..32751 x9", 0), ("32753..33000 x9", 1), ("32753..33000 x2", 0)])
def test_half_of_the_largest_on_three_samples(top, fires):
    assert told(top) == [(2, 0, Severity.WARNING)] * fires


def test_it_must_rise():
    assert told("40000 x9") == []
    assert told("60000..40000 x9") == []
    assert told("40000 x5, 41000 x4") == [(5, 0, Severity.WARNING)]


def test_told_again_only_after_it_was_clear():
    assert len(told("40000..41000 x9, 100, 40000..41000 x9")) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_other_types_are_not_judged_and_it_is_said(dtype):
    facts = dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, dtype=dtype),))
    assert told("40000..41000 x9", facts) == []
    rule = NearOverflow()
    rule.begin(facts)
    assert rule.missing() == "no float16 tensor was seen"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_no_near_overflow(value):
    assert told([40000.0, 40001.0, value] * 3) == []


def test_gradients_of_float16_parameters():
    facts = plan({"a.weight": (8, 8)}, {"dtype": {"a.weight": "float16"}})
    (found,) = findings(NearOverflow(), None, {"gradient.abs_max": {"a.weight": "40000..50000 x5"}}, facts)
    assert found.message == "the largest float16 gradient has risen to 45000, 69% of what float16 can hold (a.weight)"


def test_coverage_counts_samples():
    rule = NearOverflow()
    drive(rule, snapshots(None, {"activation.abs_max": {"act": "1 x2"}}), PLAN)
    assert rule.missing() == "2 of 3 samples"

from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.collapsed_attention_entropy import CollapsedAttentionEntropy
from trainvet.statistics import Facts, Subject

SITE = Subject("attn.softmax", "activation", "attn", "function", depth=2, shape=(4, 8, 16, 16), function="softmax")
PLAN = Facts(framework="none", subjects=(SITE,))
AT = tuple(range(0, 5000, 50))


def told(entropy, logits="150 x100", facts=PLAN, at=AT):
    columns = {"activation.entropy": {"attn.softmax": entropy}, "activation.input_abs_max": {"attn.softmax": logits}}
    found = findings(CollapsedAttentionEntropy(), None, columns, facts, at=at)
    return [(item.step, item.first_step, item.severity) for item in found]


def test_low_halved_and_with_large_logits():
    assert told("0.6 x20, 0.09 x20") == [(1200, 1000, Severity.INFO)]
    assert told("0.6 x20, 0.09 x4") == []


@pytest.mark.parametrize(("low", "fires"), [(0.099, 1), (0.101, 0)])
def test_limit_of_the_entropy(low, fires):
    assert len(told(f"0.6 x20, {low} x10")) == fires


@pytest.mark.parametrize(("before", "fires"), [(0.17, 0), (0.19, 1)])
def test_it_must_have_halved(before, fires):
    assert len(told(f"{before} x20, 0.09 x10")) == fires


def test_what_was_long_ago_does_not_count():
    assert told("0.6 x2, 0.09 x3, 0.6, " + "0.12 x40, 0.09 x20") == []


@pytest.mark.parametrize(("logits", "fires"), [("99 x100", 0), ("101 x100", 1)])
def test_limit_of_the_logits(logits, fires):
    assert len(told("0.6 x20, 0.09 x10", logits)) == fires


def test_a_sharp_head_from_the_start_is_healthy():
    assert told("0.05 x60") == []


@pytest.mark.parametrize("change", [{"function": "relu"}, {"role": "output"}, {"role": "gate"}])
def test_other_sites_are_not_judged(change):
    facts = dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, **change),))
    assert told("0.6 x20, 0.09 x10", facts=facts) == []


def test_nan_gives_no_verdict_and_coverage_counts():
    assert told([float("nan")] * 30) == []
    rule = CollapsedAttentionEntropy()
    drive(rule, snapshots(None, {"activation.entropy": {"attn.softmax": "0.6 x3"}}), PLAN)
    assert rule.missing() == "3 of 5 samples of a softmax"

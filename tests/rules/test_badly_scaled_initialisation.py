from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.badly_scaled_initialisation import BadlyScaledInitialisation
from trainvet.statistics import Facts, Subject

SHAPES = {f"{layer}.weight": (64, 200) for layer in "abc"}
SITES = tuple(
    Subject(f"act{layer}", "activation", f"act{layer}", "ReLU", depth=depth, shape=(4, 64), function="relu") for depth, layer in enumerate("abc")
)
BASE = plan(SHAPES)
PLAN = dataclasses.replace(BASE, subjects=(*BASE.subjects, *SITES))


def columns(*sizes, std=0.01, count=12):
    rms = dict(zip(("acta", "actb", "actc"), ([size] * count if not isinstance(size, list) else size for size in sizes), strict=True))
    return {"activation.rms": rms, "weight.std": {name: [std] * count for name in SHAPES}}


def told(*sizes, facts=PLAN, **how):
    return [(item.step, item.first_step, item.severity) for item in findings(BadlyScaledInitialisation(), None, columns(*sizes, **how), facts)]


TOLD = [(9, 0, Severity.WARNING)]


@pytest.mark.parametrize(("last", "expected"), [(0.0099, TOLD), (0.011, []), (0.24, []), (4.6, []), (99, []), (101, TOLD), (0.0, TOLD)])
def test_limits(last, expected):
    assert told(1.0, 0.5, last) == expected


def test_both_looks_must_agree():
    assert told(1.0, 0.5, [0.001] * 9 + [0.5] * 3) == []
    assert told(1.0, 0.5, [0.5] * 9 + [0.001] * 3) == []
    assert told(1.0, 0.5, [0.001] * 9 + [500.0] * 3) == []
    assert told(1.0, 0.5, 0.001, count=9) == []


@pytest.mark.parametrize("change", [{"role": "output"}, {"role": "gate"}, {"function": "softmax"}, {"function": ""}])
def test_layers_that_do_not_count(change):
    facts = dataclasses.replace(PLAN, subjects=(*BASE.subjects, *SITES[:2], dataclasses.replace(SITES[2], **change)))
    assert told(1.0, 0.5, 0.001, facts=facts) == []


@pytest.mark.parametrize("facts", [dataclasses.replace(PLAN, resumed=True), dataclasses.replace(PLAN, pretrained=True)])
def test_loaded_weights_are_not_judged(facts):
    assert told(1.0, 0.5, 0.001, facts=facts) == []
    rule = BadlyScaledInitialisation()
    rule.begin(facts)
    assert rule.missing() == "not judged: resumed or pretrained"


def test_a_run_that_was_not_seen_from_its_start_is_not_judged():
    rule = BadlyScaledInitialisation()
    late = snapshots(None, columns(1.0, 0.5, 0.001, count=5), at=(30, 40, 50, 60, 70))
    assert drive(rule, late, PLAN) == []
    assert rule.missing() == "the first step was not sampled"


def test_layers_that_become_known_after_the_first_sample():
    rule = BadlyScaledInitialisation()
    run = snapshots(None, columns(1.0, 0.5, 0.001))
    assert drive(rule, run[:1], Facts()) == []
    (found,) = drive(rule, run[1:], PLAN)
    well_worded(found)


def test_the_fix_names_weight_and_number():
    (found,) = findings(BadlyScaledInitialisation(), None, columns(1.0, 0.5, 0.001), PLAN)
    assert found.fixes[0] == "initialise a.weight and its like with a standard deviation of 0.1, sqrt(2/fan_in), He (now 0.01)"
    assert found.subjects == ("actc",)
    keras = dataclasses.replace(PLAN, framework="keras")
    (found,) = findings(BadlyScaledInitialisation(), None, columns(1.0, 0.5, 0.001), keras)
    assert "0.18" in found.fixes[0], "a kernel has its inputs first"


def test_nan_gives_no_verdict_and_coverage_says_what_is_missing():
    assert told(1.0, 0.5, float("nan")) == []
    rule = BadlyScaledInitialisation()
    assert rule.missing() == "a sample after 10 applied steps"
    drive(rule, snapshots(None, columns(1.0, 0.5, 0.5)), PLAN)
    assert rule.missing() == ""
    rule = BadlyScaledInitialisation()
    drive(rule, snapshots(None, columns(1.0, 0.5, 0.5)), BASE)
    assert rule.missing() == "fewer than 2 hidden activations were seen"


@pytest.mark.parametrize(("zeros", "expected"), [(0.5, TOLD), (0.94, TOLD), (0.96, []), (float("nan"), TOLD)])
def test_units_that_do_not_fire_are_no_matter_of_scale(zeros, expected):
    silent = columns(1.0, 0.0001, 0.0001) | {"activation.zero_share": {"acta": [0.5] * 12, "actb": [zeros] * 12, "actc": [0.5] * 12}}
    assert [(item.step, item.first_step, item.severity) for item in findings(BadlyScaledInitialisation(), None, silent, PLAN)] == expected

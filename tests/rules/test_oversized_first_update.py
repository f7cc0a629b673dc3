from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, plan, run
from trainvet.finding import Severity
from trainvet.rules.oversized_first_update import OversizedFirstUpdate

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abcd"} | {"d.bias": (8,)}
PLAN = plan(SHAPES)
TWO = plan({"a.weight": (8, 8), "b.weight": (8, 8)})


def columns(ratios, before=0.1, count=12):
    """``ratios`` by weight; the weight before the update has RMS ``before`` (a number, or one by weight)."""
    size = before if isinstance(before, dict) else dict.fromkeys(ratios, before)
    steps = {name: ([float(value)] * count if not isinstance(value, list) else value) for name, value in ratios.items()}
    return {
        "update.ratio": steps,
        "update.rms": {name: [ratio * size[name] for ratio in values] for name, values in steps.items()},
        "weight.rms": {name: [size[name]] * len(values) for name, values in steps.items()},
    }


@pytest.mark.parametrize(("ratio", "severity"), [(0.19, None), (0.21, Severity.WARNING), (0.99, Severity.WARNING), (1.01, Severity.ERROR)])
def test_limits_of_the_median(ratio, severity):
    found = findings(OversizedFirstUpdate(), None, columns(dict.fromkeys(SHAPES, ratio)), PLAN)
    assert [item.severity for item in found] == ([severity] if severity else [])
    assert [item.step for item in found] == [0] * len(found)


def test_the_median_counts_not_the_largest():
    assert run(OversizedFirstUpdate(), None, columns({"a.weight": 9, "b.weight": 9, "c.weight": 0.01, "d.weight": 0.01, "d.bias": 9}), PLAN) == [
        (0, "WT104")
    ]
    assert run(OversizedFirstUpdate(), None, columns({"a.weight": 9, "b.weight": 0.01, "c.weight": 0.01, "d.weight": 0.01, "d.bias": 9}), PLAN) == []


@pytest.mark.parametrize(("ratio", "severity"), [(0.9, None), (1.1, Severity.WARNING), (4.9, Severity.WARNING), (5.1, Severity.ERROR)])
def test_limits_with_few_matrices(ratio, severity):
    found = findings(OversizedFirstUpdate(), None, columns(dict.fromkeys(("a.weight", "b.weight"), ratio)), TWO)
    assert [item.severity for item in found] == ([severity] if severity else [])


def test_only_the_first_ten_applied_steps():
    late = {name: [0.01] * 10 + [3.0] * 2 for name in SHAPES}
    assert run(OversizedFirstUpdate(), None, columns(late), PLAN) == []
    last = {name: [0.01] * 9 + [3.0] * 3 for name in SHAPES}
    assert run(OversizedFirstUpdate(), None, columns(last), PLAN) == [(9, "WT104")]


def test_skipped_steps_do_not_use_up_the_ten():
    last = {name: [0.01] * 10 + [3.0] * 2 for name in SHAPES}
    assert run(OversizedFirstUpdate(), {"run.skipped": "1, 0 x11"}, columns(last), PLAN) == [(10, "WT104")]


def test_a_warning_may_grow_into_one_error():
    rising = {name: [0.3, 0.4, 0.5, 2.0, 3.0, 0.3, 2.0] for name in SHAPES}
    found = findings(OversizedFirstUpdate(), None, columns(rising), PLAN)
    assert [(item.step, item.severity) for item in found] == [(0, Severity.WARNING), (3, Severity.ERROR)]


def test_tiny_and_zero_matrices_do_not_count():
    tiny = {"a.weight": 0.0009, "b.weight": 0.0009, "c.weight": 0.1, "d.weight": 0.1, "d.bias": 0.1}
    ratios = {"a.weight": 9, "b.weight": 9, "c.weight": 0.9, "d.weight": 0.9, "d.bias": 9}
    assert run(OversizedFirstUpdate(), None, columns(ratios, tiny), PLAN) == []
    assert run(OversizedFirstUpdate(), None, columns(ratios, {**tiny, "a.weight": 0.0011}), PLAN) == [(0, "WT104")]
    zero = columns(dict.fromkeys(SHAPES, 0.01), count=1)
    zero["update.ratio"]["a.weight"] = [float("inf")]
    assert run(OversizedFirstUpdate(), None, zero, PLAN) == []


def test_a_zero_initialised_head_that_has_just_left_zero_does_not_count():
    """Adam's second step on a weight that was 0 is as large as the weight."""
    head = plan({"head.weight": (8, 8)})
    table = {"update.ratio": {"head.weight": [float("inf"), 1.2, 1.1]}, "update.rms": {"head.weight": [0.01, 0.012, 0.02]}}
    assert run(OversizedFirstUpdate(), None, table | {"weight.rms": {"head.weight": [0.01, 0.02, 0.04]}}, head) == []


def test_frozen_and_unowned_matrices_do_not_count():
    ratios = columns({"a.weight": 9, "b.weight": 9, "c.weight": 9, "d.weight": 0.01, "d.bias": 0.01})
    frozen = {"trainable": dict.fromkeys(("a.weight", "b.weight", "c.weight"), False)}
    assert run(OversizedFirstUpdate(), None, ratios, plan(SHAPES, frozen)) == []
    other = dataclasses.replace(PLAN, optimizers=(dataclasses.replace(PLAN.optimizers[0], parameters=("d.weight",)),))
    assert run(OversizedFirstUpdate(), None, ratios, other) == []


def test_nan_gives_no_verdict():
    assert run(OversizedFirstUpdate(), None, columns(dict.fromkeys(SHAPES, float("nan"))), PLAN) == []


def test_fixes_carry_the_runs_numbers():
    found = findings(OversizedFirstUpdate(), {"optimizer.learning_rate": "0.1 x12"}, columns(dict.fromkeys(SHAPES, 0.5)), PLAN)[0]
    assert found.fixes[0] == "set the learning rate to about 0.0002 (now 0.1)"
    assert found.fixes[1] == "warm the learning rate up over 2000 steps, 2/(1-beta2)"
    assert found.subjects == ("a.weight", "b.weight", "c.weight", "d.weight")
    assert found.evidence["update ratio"] == 0.5


def test_coverage_says_when_the_start_was_not_seen():
    rule = OversizedFirstUpdate()
    assert rule.missing() == "a sample within the first 10 applied steps"

from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.oversized_first_update import OversizedFirstUpdate

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abcd"} | {"d.bias": (8,)}
PLAN = plan(SHAPES)
TWO = plan({"a.weight": (8, 8), "b.weight": (8, 8)})


FLAT = {"loss.value": "2 x30"}


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
    found = findings(OversizedFirstUpdate(), FLAT, columns(dict.fromkeys(SHAPES, ratio)), PLAN)
    assert [item.severity for item in found] == ([severity] if severity else [])
    assert [(item.first_step, item.step) for item in found] == [(0, 0 if severity is Severity.ERROR else 19)] * len(found)


def test_the_median_counts_not_the_largest():
    assert run(OversizedFirstUpdate(), FLAT, columns({"a.weight": 9, "b.weight": 9, "c.weight": 0.01, "d.weight": 0.01, "d.bias": 9}), PLAN) == [
        (0, "WT104")
    ]
    assert run(OversizedFirstUpdate(), None, columns({"a.weight": 9, "b.weight": 0.01, "c.weight": 0.01, "d.weight": 0.01, "d.bias": 9}), PLAN) == []


@pytest.mark.parametrize(("ratio", "severity"), [(0.9, None), (1.1, Severity.WARNING), (4.9, Severity.WARNING), (5.1, Severity.ERROR)])
def test_limits_with_few_matrices(ratio, severity):
    found = findings(OversizedFirstUpdate(), FLAT, columns(dict.fromkeys(("a.weight", "b.weight"), ratio)), TWO)
    assert [item.severity for item in found] == ([severity] if severity else [])


def test_only_the_first_ten_applied_steps():
    late = {name: [0.01] * 10 + [3.0] * 2 for name in SHAPES}
    assert run(OversizedFirstUpdate(), None, columns(late), PLAN) == []
    last = {name: [0.01] * 9 + [3.0] * 3 for name in SHAPES}
    assert run(OversizedFirstUpdate(), None, columns(last), PLAN) == [(9, "WT104")]


def test_skipped_steps_do_not_use_up_the_ten():
    last = {name: [0.01] * 10 + [3.0] * 2 for name in SHAPES}
    assert run(OversizedFirstUpdate(), {"run.skipped": "1, 0 x11"}, columns(last), PLAN) == [(10, "WT104")]


def test_what_waits_for_the_loss_may_become_an_error():
    rising = {name: [0.3, 0.4, 0.5, 2.0, 3.0, 0.3, 2.0] for name in SHAPES}
    found = findings(OversizedFirstUpdate(), FLAT, columns(rising), PLAN)
    assert [(item.step, item.severity) for item in found] == [(3, Severity.ERROR)], "the error comes before the second look"


def test_tiny_and_zero_matrices_do_not_count():
    tiny = {"a.weight": 0.0009, "b.weight": 0.0009, "c.weight": 0.1, "d.weight": 0.1, "d.bias": 0.1}
    ratios = {"a.weight": 9, "b.weight": 9, "c.weight": 0.9, "d.weight": 0.9, "d.bias": 9}
    assert run(OversizedFirstUpdate(), None, columns(ratios, tiny), PLAN) == []
    assert run(OversizedFirstUpdate(), FLAT, columns(ratios, {**tiny, "a.weight": 0.0011}), PLAN) == [(19, "WT104")]
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
    found = findings(OversizedFirstUpdate(), {"optimizer.learning_rate": "0.1 x30", **FLAT}, columns(dict.fromkeys(SHAPES, 0.5)), PLAN)[0]
    assert found.fixes[0] == "set the learning rate to about 0.002 (now 0.1)"
    assert found.fixes[1] == "warm the learning rate up over 2000 steps, 2/(1-beta2)"
    assert found.subjects == ("a.weight", "b.weight", "c.weight", "d.weight")
    assert found.evidence["update ratio"] == 0.5


def warned(loss, ratio=0.5, **tracks):
    found = findings(OversizedFirstUpdate(), {"loss.value": loss, **tracks}, columns(dict.fromkeys(SHAPES, ratio)), PLAN)
    return [(item.first_step, item.step, item.severity) for item in found]


WARNED = [(0, 19, Severity.WARNING)]


@pytest.mark.parametrize(("later", "expected"), [(1.79, []), (1.81, WARNED), (2.0, WARNED), (9.0, WARNED)])
def test_a_loss_that_follows_at_once_takes_the_warning_away(later, expected):
    """Wide layers under Adam at 1e-2 move by half of their size in the first steps and learn well."""
    assert warned(f"2 x10, {later} x20") == expected


def test_a_spike_at_the_start_that_is_over_is_no_fault():
    assert warned("2, 9, 8, 5, 3, 2 x5, 1.5 x20") == []


def test_losses_below_zero():
    assert warned("-1 x10, -1.2 x20") == []
    assert warned("-1 x10, -1.05 x20") == WARNED


def test_of_several_losses_one_that_falls_is_enough():
    both = {"loss.value": {"generator": "1 x10, 3 x20", "discriminator": "1.4 x10, 0.7 x20"}}
    assert findings(OversizedFirstUpdate(), both, columns(dict.fromkeys(SHAPES, 0.5)), PLAN) == []


def test_a_loss_that_is_not_finite_ends_the_wait():
    found = findings(OversizedFirstUpdate(), {"loss.value": [2.0] * 5 + [float("nan")] * 20}, columns(dict.fromkeys(SHAPES, 0.5)), PLAN)
    assert [(item.first_step, item.step, item.severity) for item in found] == [(0, 5, Severity.WARNING)]
    assert found[0].message.endswith(", and the loss is nan")
    assert warned([float("nan")] * 30, ratio=0.1) == []


def test_losses_of_skipped_steps_do_not_count():
    assert warned([float("inf")] * 3 + [2.0] * 10 + [1.0] * 15, **{"run.skipped": "1 x3, 0 x25"}) == []


def test_losses_on_sampled_steps_only_are_waited_for():
    def sampled(later):
        return dict.fromkeys(range(10), 2.0) | dict.fromkeys((50, 100, 150, 200), later)

    assert [item[1] for item in warned(sampled(2.0))] == [150]
    assert warned(sampled(1.0)) == []


@pytest.mark.parametrize(("loss", "told"), [("2 x15", 1), ("2 x10, 1 x5", 0), ("2 x13", 1), ("2 x12", 0)])
def test_a_run_that_ends_early_is_judged_by_the_losses_there_are(loss, told):
    rule = OversizedFirstUpdate()
    drive(rule, snapshots({"loss.value": loss}, columns(dict.fromkeys(SHAPES, 0.5))), PLAN)
    assert len(list(rule.end(15))) == told
    assert list(rule.end(15)) == []


def test_without_a_loss_the_ratio_decides():
    late = columns(dict.fromkeys(SHAPES, 0.5), count=25)
    assert run(OversizedFirstUpdate(), None, late, PLAN) == [(19, "WT104")]


def test_coverage_says_when_the_start_was_not_seen():
    rule = OversizedFirstUpdate()
    assert rule.missing() == "a sample within the first 10 applied steps"

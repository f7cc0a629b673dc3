from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.swallowed_update import SwallowedUpdate

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abc"} | {"norm.weight": (8,)}
BF16 = {"dtype": dict.fromkeys(SHAPES, "bfloat16")}
PLAN = plan(SHAPES, BF16)
RATE = {"optimizer.learning_rate": "1e-4 x20"}


def shares(a=0.95, b=0.95, c=0.95, norm=0.2, count=9):
    return {"update.swallowed_share": {name: [value] * count for name, value in zip(SHAPES, (a, b, c, norm), strict=True)}}


def told(columns, facts=PLAN, rate=RATE):
    return [(item.step, item.severity) for item in findings(SwallowedUpdate(), rate, columns, facts)]


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ((0.89, 0.89, 0.89), None),
        ((0.91, 0.91, 0.91), Severity.WARNING),
        ((0.1, 0.91, 0.91), Severity.WARNING),
        ((0.1, 0.1, 0.91), Severity.INFO),
    ],
)
def test_limits_of_the_median_and_the_fifth_sample(values, severity):
    assert told(shares(*values)) == ([(4, severity)] if severity else [])
    assert told(shares(*values, count=4)) == []


def test_a_gain_at_one_that_never_moves_is_information():
    assert [item[1] for item in told(shares(0.3, 0.3, 0.3, 1.0))] == [Severity.INFO]


def test_without_matrices_all_weights_count():
    only = {"norm.weight": (8,)}
    facts = plan(only, {"dtype": {"norm.weight": "float16"}})
    assert [item[1] for item in told({"update.swallowed_share": {"norm.weight": [1.0] * 9}}, facts)] == [Severity.WARNING]


QUIET = {
    "float32 weights": plan(SHAPES),
    "frozen": plan(SHAPES, BF16 | {"trainable": dict.fromkeys(SHAPES, False)}),
    "the optimizer holds float32 copies": dataclasses.replace(
        PLAN, optimizers=(dataclasses.replace(PLAN.optimizers[0], parameters=(), unknown_parameters=4),)
    ),
}


@pytest.mark.parametrize("facts", QUIET.values(), ids=QUIET)
def test_quiet(facts):
    assert told(shares(), facts) == []
    rule = SwallowedUpdate()
    rule.begin(facts)
    assert rule.missing() == "no trainable float16 or bfloat16 weight was seen"


def test_warm_up_and_the_end_of_a_decay_are_not_judged():
    assert told(shares(), rate={"optimizer.learning_rate": "1e-6..1e-4 x20"}) == []
    assert told(shares(count=20), rate={"optimizer.learning_rate": "1e-2 x2, 0.9e-4 x18"}) == []
    assert len(told(shares(count=20), rate={"optimizer.learning_rate": "1e-2 x2, 1.1e-4 x18"})) == 1
    assert told(shares(), rate=None) == [], "a rate that is not known"


def test_nan_gives_no_verdict_and_one_good_sample_ends_the_streak():
    assert told(shares(*[float("nan")] * 4)) == []
    broken = {"update.swallowed_share": dict.fromkeys(SHAPES, [0.95, 0.95, 0.95, 0.95, 0.5] * 4)}
    assert told(broken) == []


@pytest.mark.parametrize(
    ("framework", "text"), [("lightning", 'precision="bf16-mixed"'), ("keras", '"mixed_bfloat16"'), ("torch", "dtype=torch.bfloat16")]
)
def test_the_fix_is_the_frameworks(framework, text):
    (found,) = findings(SwallowedUpdate(), RATE, shares(), dataclasses.replace(PLAN, framework=framework))
    assert text in found.fixes[0]
    assert "at a learning rate of 0.0001" in found.message
    assert found.subjects == ("a.weight", "b.weight", "c.weight")


def test_coverage_counts_samples():
    rule = SwallowedUpdate()
    drive(rule, snapshots(RATE, shares(count=3)), PLAN)
    assert rule.missing().startswith("3 of 5 samples")

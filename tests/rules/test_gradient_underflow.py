from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.gradient_underflow import GradientUnderflow
from trainvet.statistics import Subject

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abc"} | {"c.bias": (8,)}
PLAN = plan(SHAPES, loss_scaler=True, precision="16-mixed")
SITES = tuple(Subject(layer, "activation", layer, "Linear", shape=(4, 8), dtype="float16") for layer in "abc")
PURE = dataclasses.replace(plan(SHAPES, precision="32"), subjects=(*plan(SHAPES).subjects, *SITES))
COUNT = 12


def shares(*values, count=COUNT, **more):
    """The share of each matrix on every sample."""
    columns = {"gradient.underflow_share": dict.fromkeys(SHAPES, [0.0] * count), "gradient.abs_max": dict.fromkeys(SHAPES, [1e-6] * count)}
    for name, value in zip(SHAPES, values, strict=False):
        columns["gradient.underflow_share"] = {**columns["gradient.underflow_share"], name: [value] * count}
    return {**columns, **more}


def told(columns, facts=PLAN, loss="2 x12", **how):
    return [(item.step, item.severity) for item in findings(GradientUnderflow(), {"loss.value": loss}, columns, facts, **how)]


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ((0.09, 0.09, 0.09), None),
        ((0.11, 0, 0), Severity.INFO),
        ((0.89, 0.1, 0.1), Severity.INFO),
        ((0.91, 0.1, 0.1), Severity.WARNING),
        ((0.49, 0.49, 0.49), Severity.INFO),
        ((0.51, 0.51, 0.1), Severity.WARNING),
    ],
)
def test_limits_and_the_fifth_sample(values, severity):
    assert told(shares(*values)) == ([(4, severity)] if severity else [])
    assert told(shares(*values, count=4)) == []


def test_zero_gradients_and_biases_do_not_count_and_nan_is_no_verdict():
    zero = shares(1.0, 1.0, 1.0) | {"gradient.abs_max": dict.fromkeys(SHAPES, [0.0] * COUNT)}
    assert told(zero | {"activation.abs_max": {"a": [0.0] * COUNT}}) == []
    assert told(shares(0, 0, 0, 1.0)) == [], "a bias is no matrix"
    assert told(shares(*[float("nan")] * 3)) == []


def test_convergence_is_no_underflow():
    loss = "2 x12, 0.019 x12"
    late = {key: {name: [0.0] * 12 + [0.99] * 12 for name in SHAPES} for key in ("gradient.underflow_share",)}
    late["gradient.abs_max"] = dict.fromkeys(SHAPES, [1e-6] * 24)
    assert [step for step, severity in told(late, loss=loss)] in ([], [16]), "the loss is judged by its last rows"
    assert told(late, loss="2 x10, 0.01 x14") == []
    assert told(late, loss="2 x24") == [(16, Severity.WARNING)]


@pytest.mark.parametrize("facts", [plan(SHAPES, precision="32"), plan(SHAPES, precision="bf16-mixed", loss_scaler=True), plan(SHAPES)])
def test_other_types_are_not_judged_and_it_is_said(facts):
    assert told(shares(1.0, 1.0, 1.0), facts) == []
    rule = GradientUnderflow()
    rule.begin(facts)
    assert rule.missing() == "no float16 computation was seen"


def flat(zero, outputs=1.0, count=COUNT):
    gradients = {name: [0.0 if name in zero else 1e-3] * count for name in SHAPES}
    return {
        "gradient.abs_max": gradients,
        "gradient.present": dict.fromkeys(SHAPES, [1.0] * count),
        "activation.abs_max": {layer: [outputs] * count for layer in "abc"},
    }


MOST = ("a.weight", "b.weight", "c.weight")


def test_gradients_of_exactly_zero_in_most_float16_weights():
    found = findings(GradientUnderflow(), {"loss.value": "2 x12"}, flat(MOST), PURE)
    assert [(item.step, item.first_step, item.severity) for item in found] == [(8, 4, Severity.WARNING)]
    assert found[0].subjects == MOST
    assert found[0].causes[0] == "no loss scaler, or one that is too small"
    assert "bfloat16" in found[0].fixes[0]
    assert told(flat(MOST), PURE, loss="2 x8") == [(8, Severity.WARNING)], "the last known loss counts"


def test_what_takes_the_zeros_away():
    assert told(flat(MOST[:2]), PURE) == [], "half is not most"
    assert told(flat(MOST, outputs=0.0), PURE) == [], "a layer that gives 0 is the reason"
    assert told(flat(MOST), PURE, loss="0 x12") == []
    assert told(flat(MOST), PURE, loss=[float("nan")] * 12) == []
    assert told(flat(MOST), plan(SHAPES)) == [], "float32"
    absent = flat(MOST) | {"gradient.present": dict.fromkeys(SHAPES, [0.0] * COUNT)}
    assert told(absent, PURE) == [], "None is no zero"
    assert told(flat(MOST, count=8), PURE) == []


def test_modules_in_float32_do_not_count():
    facts = dataclasses.replace(PURE, subjects=tuple(item for item in PURE.subjects if item.kind != "activation" or item.name == "a"))
    assert run(GradientUnderflow(), {"loss.value": "2 x12"}, flat(("b.weight", "c.weight", "c.bias")), facts) == []
    assert run(GradientUnderflow(), {"loss.value": "2 x12"}, flat(("a.weight",)), facts) == [(8, "LS103")]


def test_the_fix_names_the_setting_and_the_scale():
    scale = {"loss.value": "2 x12", "run.loss_scale": "128 x12"}
    found = findings(GradientUnderflow(), scale, shares(0.95, 0, 0), dataclasses.replace(PLAN, framework="lightning"))[0]
    assert found.fixes[0] == 'compute in bfloat16: Trainer(precision="bf16-mixed")'
    assert "at a loss scale of 128" in found.message
    assert found.subjects == ("a.weight",)


def test_coverage_counts_samples():
    rule = GradientUnderflow()
    drive(rule, snapshots({"loss.value": "2 x3"}, shares(0, 0, 0, count=3)), PLAN)
    assert rule.missing() == "3 of 5 samples"

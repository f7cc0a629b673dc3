from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, plan, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.unchanged_weight import UnchangedWeight
from trainvet.statistics import Facts, Optimizer

SHAPES = {"a.weight": (64, 64), "a.bias": (64,), "b.weight": (2, 64)}
PLAN = plan(SHAPES)
RATE = {"optimizer.learning_rate": "0.01 x60"}


def columns(unchanged, gradient=None, **more):
    """All weights move but those named in ``unchanged``; gradients have RMS 1 but those named in ``gradient``."""
    table = {
        "update.unchanged": {name: unchanged.get(name, "0 x40") for name in SHAPES},
        "gradient.rms": {name: (gradient or {}).get(name, "1 x40") for name in SHAPES},
        "weight.rms": dict.fromkeys(SHAPES, "0.1 x40"),
    }
    return table | {f"gradient.{key}": {name: value.get(name, "0 x40") for name in SHAPES} for key, value in more.items()}


def test_fires_on_the_twentieth_sample_and_once():
    assert run(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}), PLAN) == [(19, "WT101")]
    assert run(UnchangedWeight(), RATE, columns({"a.weight": "1 x19, 0 x21"}), PLAN) == []


def test_is_told_again_after_a_change():
    found = findings(UnchangedWeight(), RATE, columns({"a.weight": "0 x2, 1 x20, 0, 1 x17"}), PLAN)
    assert [(item.step, item.first_step) for item in found] == [(21, 2)]
    again = "1 x20, 0, 1 x20"
    many = {key: dict.fromkeys(SHAPES, "1 x41" if key == "gradient.rms" else "0.1 x41") for key in ("gradient.rms", "weight.rms")}
    many["update.unchanged"] = {"a.weight": again, "a.bias": "0 x41", "b.weight": "0 x41"}
    assert [step for step, _ in run(UnchangedWeight(), {"optimizer.learning_rate": "0.01 x60"}, many, PLAN)] == [19, 40]


@pytest.mark.parametrize(("rms", "fires"), [("1.1e-3 x40", True), ("0.9e-3 x40", False), ("0 x40", False), ("nan x40", False)])
def test_a_gradient_below_a_thousandth_of_the_others_gives_no_verdict(rms, fires):
    assert bool(run(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}, {"a.weight": rms}), PLAN)) is fires


def test_weights_without_a_gradient_do_not_lower_the_bar():
    gradient = {"a.weight": "1e-5 x40", "a.bias": "0 x40"}
    assert run(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}, gradient), PLAN) == []


def test_samples_with_a_rate_of_zero_are_left_out():
    rate = {"optimizer.learning_rate": "0, 0, 0, 0.01 x37"}
    assert run(UnchangedWeight(), rate, columns({"a.weight": "1 x40"}), PLAN) == [(22, "WT101")]
    assert run(UnchangedWeight(), {"optimizer.learning_rate": "0 x40"}, columns(dict.fromkeys(SHAPES, "1 x40")), PLAN) == []


def test_a_rate_that_is_not_known_gives_no_verdict():
    rule = UnchangedWeight()
    rule.begin(PLAN)
    assert run(UnchangedWeight(), None, columns({"a.weight": "1 x40"}), PLAN) == []
    assert rule.missing() == "0 of 20 samples with a learning rate above 0"


def test_the_rate_of_the_weights_own_group_counts():
    groups = {"group": {"a.weight": "frozen"}}
    rate = {"optimizer.learning_rate": {"group 0": "0.01 x40", "frozen": "0 x40"}}
    assert run(UnchangedWeight(), rate, columns({"a.weight": "1 x40"}), plan(SHAPES, groups)) == []
    assert len(run(UnchangedWeight(), rate, columns({"a.bias": "1 x40"}), plan(SHAPES, groups))) == 1


def test_frozen_and_unowned_weights_are_quiet():
    still = columns({"a.weight": "1 x40"})
    assert run(UnchangedWeight(), RATE, still, plan(SHAPES, {"trainable": {"a.weight": False}})) == []
    others = Optimizer("optimizer 0", parameters=("a.bias", "b.weight"))
    assert run(UnchangedWeight(), RATE, still, plan(SHAPES, optimizer=others)) == []
    assert run(UnchangedWeight(), RATE, still, Facts()) == []


def test_a_bias_before_a_norm_and_a_clamped_scalar_are_info():
    found = findings(UnchangedWeight(), RATE, columns({"a.bias": "1 x40"}), plan(SHAPES, {"role": {"a.bias": "bias-before-norm"}}))
    assert [item.severity for item in found] == [Severity.INFO]
    found = findings(UnchangedWeight(), RATE, columns({"a.bias": "1 x40"}), plan(SHAPES, {"shape": {"a.bias": (1,)}}))
    assert [item.severity for item in found] == [Severity.INFO]
    assert [item.severity for item in findings(UnchangedWeight(), RATE, columns({"a.bias": "1 x40"}), PLAN)] == [Severity.ERROR]


def test_large_tables_of_which_a_step_touches_few_rows_are_quiet():
    still = columns({"a.weight": "1 x40"}, zero_share={"a.weight": "0.95 x40"})
    assert run(UnchangedWeight(), RATE, still, PLAN) == []
    assert len(run(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}, zero_share={"a.weight": "0.85 x40"}), PLAN)) == 1
    for shape, fires in (((32, 32), 1), ((33, 32), 0)):
        assert len(run(UnchangedWeight(), RATE, still, plan(SHAPES, {"shape": {"a.weight": shape}}))) == fires
    small = columns({"b.weight": "1 x40"}, zero_share={"b.weight": "0.95 x40"})
    assert len(run(UnchangedWeight(), RATE, small, PLAN)) == 1, "all elements of a small tensor are compared"
    assert run(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}), plan(SHAPES, {"role": {"a.weight": "embedding"}})) == []


def test_one_finding_names_all_weights_upstream_first():
    found = findings(UnchangedWeight(), RATE, columns({"b.weight": "1 x40", "a.weight": "1 x40"}), PLAN)
    assert [item.subjects for item in found] == [("a.weight", "b.weight")]


def test_an_update_that_is_lost_in_rounding_is_said_so():
    half = plan(SHAPES, {"dtype": {"a.weight": "bfloat16"}})
    sgd = dataclasses.replace(half, optimizers=(Optimizer("optimizer 0", "SGD", "sgd", parameters=tuple(SHAPES)),))
    found = findings(UnchangedWeight(), RATE, columns({"a.weight": "1 x40"}, dict.fromkeys(SHAPES, "1e-3 x40")), sgd)[0]
    assert found.causes[0] == "an update of about 0.0001 of the weight is lost in bfloat16 rounding"
    assert "set the learning rate to about 0.1 (now 0.01)" in found.fixes
    assert "lost" not in " ".join(findings(UnchangedWeight(), {"optimizer.learning_rate": "0.1 x40"}, columns({"a.weight": "1 x40"}), sgd)[0].causes)


# half a unit in the last place of 0.1: 5.96e-9 in float32, 3.9e-4 in bfloat16
@pytest.mark.parametrize(
    ("dtype", "rate", "expected"),
    [("float32", 1e-49, 0), ("float32", 5.9e-9, 0), ("float32", 6.1e-9, 1), ("bfloat16", 3.8e-4, 0), ("bfloat16", 4.0e-4, 1), ("", 1e-49, 1)],
)
def test_a_rate_that_no_weight_of_the_type_can_feel_is_no_matter_of_one_weight(dtype, rate, expected):
    rates = {"optimizer.learning_rate": f"{rate} x40"}
    assert len(run(UnchangedWeight(), rates, columns({"a.weight": "1 x40"}), plan(SHAPES, {"dtype": dict.fromkeys(SHAPES, dtype)}))) == expected


def test_a_rate_that_fades_below_the_number_format_ends_the_count():
    fading = {"optimizer.learning_rate": "0.01 x10, 1e-49 x30"}
    facts = plan(SHAPES, {"dtype": dict.fromkeys(SHAPES, "float32")})
    assert run(UnchangedWeight(), fading, columns(dict.fromkeys(SHAPES, "0 x10, 1 x30")), facts) == []


def test_an_unfrozen_weight_starts_from_nothing():
    rule = UnchangedWeight()
    rule.begin(plan(SHAPES, {"trainable": {"a.weight": False}}))
    many = snapshots(RATE, columns({"a.weight": "1 x40"}))[:40]
    for snapshot in many[:15]:
        assert not list(rule.check(snapshot))
    rule.begin(PLAN)
    told = [snapshot.step for snapshot in many[15:] for _ in rule.check(snapshot)]
    assert told == [34]

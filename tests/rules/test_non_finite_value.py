from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import drive, findings, plan, run
from trainvet.finding import Severity
from trainvet.rules.non_finite_value import NonFiniteValue
from trainvet.statistics import Facts, Snapshot, Subject, Table, Track

SHAPES = {"a.weight": (8, 4), "a.bias": (8,), "b.weight": (2, 8)}
PLAN = plan(SHAPES)
SITES = tuple(Subject(name, "activation", name, depth=depth) for depth, name in enumerate(("act.late", "act.early", "act.first")[::-1]))
SCALED = dataclasses.replace(PLAN, loss_scaler=True, precision="16-mixed")


def quiet(*tables: str, steps: int = 3) -> dict[str, dict[str, str]]:
    """Finite counts for the usual tables."""
    return {key: dict.fromkeys(SHAPES, f"0 x{steps}") for key in tables}


FIRES = [
    ({"loss.value": "1 x12, nan, 1 x3"}, 12),
    ({"loss.value": "1 x12, inf"}, 12),
    ({"loss.value": "1 x12, -inf"}, 12),
    ({"loss.value": "nan x20"}, 0),
    ({"run.gradient_norm": "1 x5, nan"}, 5),
    ({"loss.value": "1 x9", "run.gradient_norm": "1 x5, inf, 1 x3"}, 5),
]
QUIET = [
    {"loss.value": "1 x100", "run.gradient_norm": "1e18 x100"},
    {"loss.value": "1e38 x5, 0 x5, -1 x5"},
    {"optimizer.learning_rate": "0.1 x9"},
]


@pytest.mark.parametrize(("tracks", "step"), FIRES)
def test_fires_at_the_first_bad_step_once(tracks, step):
    assert run(NonFiniteValue(), tracks, facts=PLAN) == [(step, "NF101")]


@pytest.mark.parametrize("tracks", QUIET)
def test_finite_series_are_quiet(tracks):
    assert run(NonFiniteValue(), tracks, facts=PLAN) == []


def test_nothing_is_told_before_the_first_bad_step():
    assert run(NonFiniteValue(), {"loss.value": "1 x12"}, facts=PLAN) == []


def test_a_new_episode_needs_finite_steps_in_between():
    one = {"loss.value": "1 x10, nan, 1 x19, nan, 1 x20"}
    two = {"loss.value": "1 x10, nan, 1 x20, nan, 1 x20"}
    assert [step for step, _ in run(NonFiniteValue(), one, facts=PLAN)] == [10]
    assert [step for step, _ in run(NonFiniteValue(), two, facts=PLAN)] == [10, 31]


def test_steps_that_were_not_measured_do_not_end_an_episode():
    assert run(NonFiniteValue(), {"loss.value": {0: 1.0, 50: float("nan"), 100: float("nan"), 150: float("nan")}}, facts=PLAN) == [(50, "NF101")]


def test_the_loss_that_is_bad_is_named():
    found = findings(NonFiniteValue(), {"loss.value": {"loss of generator": "1 x5", "loss of critic": "1 x4, nan"}}, facts=PLAN)
    assert found[0].subjects == ("loss of critic",)
    assert found[0].severity is Severity.ERROR
    assert str(found[0].evidence["loss of critic"]) == "nan"


# ---- the place


def place(tracks=None, columns=None, facts=PLAN, at=None):
    found = findings(NonFiniteValue(), tracks, columns, facts, at)
    assert len(found) == 1
    return found[0]


def test_input_before_everything_else():
    columns = {
        "input.nan": {"input.0": "0 x3", "input.1": "0 x2, 3"},
        "input.inf": {"input.0": "0 x3", "input.1": "0 x3"},
        "activation.nan": {"act.first": "0 x2, 9"},
        "gradient.nan": dict.fromkeys(SHAPES, "0 x2, 1"),
        "gradient.inf": dict.fromkeys(SHAPES, "0 x3"),
    }
    found = place({"loss.value": "1 x2, nan"}, columns)
    assert found.where == "input.1"
    assert "(3 of its elements)" in found.message
    assert "missing values" in found.causes[0]


def test_an_input_that_held_nan_without_harm_is_not_blamed():
    columns = {"input.nan": {"input": "3 x3"}, "activation.nan": {"act.first": "0 x2, 1"}}
    facts = dataclasses.replace(PLAN, subjects=(*PLAN.subjects, *SITES))
    assert place({"loss.value": "1 x2, nan"}, columns, facts).where == "act.first"


def test_the_first_activation_in_forward_order():
    facts = dataclasses.replace(PLAN, subjects=(*PLAN.subjects, *SITES))
    columns = {"activation.nan": {"act.late": "0 x2, 5", "act.early": "0 x2, 5", "act.first": "0 x3"}}
    assert place({"loss.value": "1 x2, nan"}, columns, facts).where == "act.early"


def test_a_bad_loss_after_clean_activations_was_born_in_the_loss():
    found = place({"loss.value": "1 x2, nan"}, {"activation.nan": {"act.first": "0 x3"}})
    assert found.where == "loss"
    assert "born after them" in found.message


def test_backward_the_place_is_the_bad_gradient_nearest_the_output():
    columns = {"gradient.nan": {"a.weight": "0 x2, 4", "a.bias": "0 x2, 1", "b.weight": "0 x3"}, "gradient.inf": dict.fromkeys(SHAPES, "0 x3")}
    found = place({"loss.value": "1 x3", "run.gradient_norm": "1 x2, nan"}, columns)
    assert found.where == "a.bias"
    assert found.evidence["gradients"] == "2 of 3"


def test_gradients_alone_without_series():
    columns = {"gradient.nan": {"a.weight": "0, 0, 4"}, "gradient.inf": {"a.weight": "0 x3"}}
    assert place(None, columns).step == 2


def test_a_norm_that_overflowed_is_called_so():
    finite = quiet("gradient.nan", "gradient.inf")
    found = place({"loss.value": "1 x3", "run.gradient_norm": "1 x2, inf"}, finite)
    assert "norm overflowed float32 although every element is finite" in found.message
    assert "norm overflowed float32" in place({"run.gradient_norm": "1 x2, inf"}).message
    assert "overflowed" not in place({"run.gradient_norm": "1 x2, nan"}).message


def test_a_weight_with_a_finite_gradient_is_the_place():
    columns = quiet("gradient.nan", "gradient.inf", "weight.inf") | {"weight.nan": {"a.weight": "0 x3", "a.bias": "0, 0, 1", "b.weight": "0 x3"}}
    found = place({"loss.value": "1 x3"}, columns)
    assert (found.where, found.severity) == ("a.bias", Severity.FATAL)
    assert "checkpoint written before step 2" in found.fixes[-1]


def test_a_weight_that_its_gradient_made_bad_is_not_the_place():
    bad = dict.fromkeys(SHAPES, "0 x2, 1")
    found = place({"loss.value": "1 x2, nan"}, {"gradient.nan": bad, "gradient.inf": dict.fromkeys(SHAPES, "0 x3"), "weight.nan": bad})
    assert (found.where, found.severity) == ("loss", Severity.FATAL)
    assert "3 weights" in found.message


def test_of_weights_seen_before_the_update_the_bad_ones_are_the_place():
    bad = Table(tuple(SHAPES), {"nan": np.array([4.0, 1.0, 1.0]), "inf": np.zeros(3)})
    for count, where in (([0.0, 1.0, 0.0], "a.bias"), ([1.0, 1.0, 1.0], "loss")):
        tables = {"gradient": bad, "weight": Table(tuple(SHAPES), {"nan": np.zeros(3), "inf": np.array(count)})}
        loss = {"loss.value": {"loss": Track(np.array([7]), np.array([7]), np.array([np.nan]))}}
        found = drive(NonFiniteValue(), [Snapshot(7, 7, tables=tables, series=loss, urgent=True)], PLAN)
        assert [item.where for item in found] == [where]


def test_a_silent_nan_in_the_first_kernel_is_seen_although_the_loss_stays_finite():
    """TensorFlow's fused kernel on CPU turns NaN into 0."""
    columns = {"input.nan": {"input": "7 x3"}, "weight.nan": {"a.weight": "4 x3", "b.weight": "0 x3"}}
    found = place({"loss.value": "2.3 x3"}, columns)
    assert (found.step, found.where, found.severity) == (0, "input", Severity.FATAL)


def test_tables_of_a_later_step_do_not_place_an_earlier_one():
    columns = {"activation.nan": {"act.first": "0, 9"}, "weight.nan": {"a.weight": "0, 9"}}
    first, second = findings(NonFiniteValue(), {"loss.value": "1 x30, nan x31"}, columns, PLAN, at=(0, 60))
    assert (first.step, first.where, first.severity) == (30, "loss", Severity.ERROR)
    assert (second.step, second.where, second.severity, second.first_step) == (60, "loss", Severity.FATAL, 30)


# ---- weights, buffers, masks


def test_told_again_only_where_it_becomes_worse():
    columns = {"weight.nan": {"a.weight": "0, 0, 1 x6"}}
    found = findings(NonFiniteValue(), {"loss.value": "1, nan x7"}, columns, PLAN)
    assert [(item.step, item.severity) for item in found] == [(1, Severity.ERROR), (2, Severity.FATAL)]


def test_finite_losses_do_not_end_an_episode_in_the_weights():
    columns = {"weight.nan": {"a.weight": [0, 1, 1, 1, 1]}}
    assert len(run(NonFiniteValue(), {"loss.value": "1 x201"}, columns, PLAN, (0, 50, 100, 150, 200))) == 1
    healed = {"weight.nan": {"a.weight": [0, 1, 0, 0, 1]}}
    assert [step for step, _ in run(NonFiniteValue(), {"loss.value": "1 x201"}, healed, PLAN, (0, 50, 100, 150, 200))] == [50, 200]


def test_a_buffer_that_becomes_bad_is_fatal_and_one_that_always_was_is_a_mask():
    found = place({"loss.value": "1 x3"}, {"buffer.nonfinite": {"mask": "28 x3", "norm.running_var": "0 x2, 8"}})
    assert (found.where, found.severity) == ("norm.running_var", Severity.FATAL)
    assert run(NonFiniteValue(), {"loss.value": "1 x9"}, {"buffer.nonfinite": {"mask": "28 x9"}}, PLAN) == []


def test_a_frozen_weight_that_always_was_infinite_is_a_mask_and_a_trainable_one_is_not():
    frozen = plan(SHAPES, {"trainable": {"a.bias": False}})
    assert run(NonFiniteValue(), {"loss.value": "1 x9"}, {"weight.inf": {"a.bias": "3 x9"}}, frozen) == []
    assert run(NonFiniteValue(), {"loss.value": "1 x9"}, {"weight.inf": {"a.bias": "3 x9"}}, PLAN) == [(0, "NF101")]


# ---- what does no harm


def test_nan_in_an_activation_counts_only_where_nothing_is_known_to_be_finite():
    nan = {"activation.nan": {"act.first": "0 x2, 5"}}
    assert run(NonFiniteValue(), {"loss.value": "1 x3"}, nan, PLAN) == []
    assert run(NonFiniteValue(), None, nan | quiet("gradient.nan", "gradient.inf"), PLAN) == []
    assert run(NonFiniteValue(), None, nan, PLAN) == [(2, "NF101")]


def test_infinite_activations_and_masked_inputs_are_legal():
    columns = {
        "activation.inf": {"act.first": "64 x9"},
        "activation.nan": {"act.first": "0 x9"},
        "input.nan": {"input": "5 x9"},
        "label.nan": {"label": "5 x9"},
    }
    assert run(NonFiniteValue(), {"loss.value": "1 x9"}, columns, PLAN) == []


def test_a_gradient_that_the_loss_scaler_skips_is_its_business():
    tracks = {"loss.value": "1 x9", "run.gradient_norm": "1 x3, inf x2, 1 x3, nan", "run.skipped": "0 x3, 1 x2, 0 x3, 1"}
    columns = {"gradient.inf": {"a.weight": "0 x3, 4 x2, 0 x4"}, "gradient.nan": {"a.weight": "0 x8, 4"}}
    assert run(NonFiniteValue(), tracks, columns, SCALED) == []
    assert run(NonFiniteValue(), tracks | {"run.skipped": "0 x3, 1 x2, 0 x4"}, columns, SCALED) == [(8, "NF101")]
    assert run(NonFiniteValue(), {"run.gradient_norm": "1 x3, inf"}, None, SCALED) == []


def test_a_step_that_our_own_guard_held_is_told():
    tracks = {"loss.value": "1 x3, nan, 1", "run.gradient_norm": "1 x3, nan, 1", "run.skipped": "0 x3, 1, 0"}
    assert run(NonFiniteValue(), tracks, None, PLAN) == [(3, "NF101")]


def test_a_bad_step_that_the_guard_drops_is_a_warning_and_the_one_it_cannot_drop_an_error():
    tracks = {"loss.value": "1 x3, nan x3", "run.gradient_norm": "1 x3, nan x3", "run.skipped": "0 x3, 1 x2, 0"}
    assert run(NonFiniteValue(), tracks, None, PLAN) == [(3, "NF101"), (5, "NF101")]
    found = place({"loss.value": "1 x3, nan, 1", "run.skipped": "0 x3, 1, 0"}, None, PLAN)
    assert found.severity is Severity.WARNING
    assert "the guard dropped the update" in found.message


def test_a_bad_loss_in_a_skipped_step_is_a_warning():
    found = place({"loss.value": "1 x3, nan, 1 x5", "run.skipped": "0 x3, 1, 0 x5"}, None, SCALED)
    assert found.severity is Severity.WARNING
    assert "skipped" in found.message
    assert "float16 overflow" in " ".join(found.causes)


def test_a_fix_carries_the_runs_own_learning_rate():
    found = place({"loss.value": "1 x3, nan", "optimizer.learning_rate": "0.5 x4"})
    assert "set the learning rate to about 0.05 (now 0.5)" in found.fixes[1]


def test_without_facts_it_still_speaks():
    assert run(NonFiniteValue(), {"loss.value": "nan"}, facts=Facts()) == [(0, "NF101")]

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.missing_gradient import MissingGradient
from trainvet.statistics import Optimizer, Severance

SHAPES = {"stem.weight": (8, 4), "stem.bias": (8,), "branch.weight": (8, 8), "branch.bias": (8,), "head.weight": (2, 8), "head.bias": (2,)}
NONE, ZERO = "none", "zero"


def columns(samples, shapes=SHAPES, **missing):
    """Every parameter has a gradient of 1, those in ``missing`` none or one of 0 (or numbers of their own)."""
    known = {name.replace("_", "."): what for name, what in missing.items()}
    size = {name: [0.0] * samples if known.get(name) in (NONE, ZERO) else known.get(name, [1.0] * samples) for name in shapes}
    present = {name: [0.0 if known.get(name) == NONE else 1.0] * samples for name in shapes}
    return {"gradient.abs_max": size, "gradient.present": present}


def found(samples=10, shapes=SHAPES, facts=None, table=None, **missing):
    return findings(MissingGradient(), None, table or columns(samples, shapes, **missing), facts or plan(shapes))


@pytest.mark.parametrize(("what", "text"), [(NONE, "no gradient at all"), (ZERO, "only gradients of 0")])
def test_told_at_the_tenth_sample(what, text):
    (told,) = found(30, branch_weight=what, branch_bias=what)
    assert (told.step, told.first_step, told.severity) == (9, 0, Severity.WARNING)
    assert told.subjects == ("branch.weight", "branch.bias")
    assert told.message == f"2 of 6 parameters get {text}"
    assert told.evidence == {"without gradient": 2 if what == NONE else 0, "only zeros": 0 if what == NONE else 2, "parameters": 6, "samples": 10}
    assert found(9, branch_weight=what) == []


def test_exactly_all_of_them_in_one_finding_upstream_first():
    (told,) = found(10, head_weight=ZERO, stem_weight=NONE)
    assert told.subjects == ("stem.weight", "head.weight")
    assert "no gradient at all (1) or only 0" in told.message
    assert told.fixes[0] == "connect stem.weight to the loss"


@pytest.mark.parametrize("sample", [0, 9])
def test_one_gradient_is_enough(sample):
    assert found(30, branch_weight=[float(step == sample) for step in range(30)]) == []


def test_zero_initialised_branches_learn_from_the_second_step_on():
    """The last scale of a residual block starts at 0, as LoRA's B does: nothing reaches what lies before it at step 0."""
    assert found(30, branch_weight=[0.0, *[1e-9] * 29], branch_bias=[0.0, 0.0, *[1e-9] * 28]) == []


def test_a_gradient_of_nan_is_a_gradient():
    assert drive(MissingGradient(), snapshots(columns=columns(30, branch_weight=[np.nan] * 30)), plan(SHAPES)) == []


def test_vectors_alone_are_information():
    assert [item.severity for item in found(10, stem_bias=ZERO, head_bias=NONE)] == [Severity.INFO]


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        (("stem_weight", "stem_bias", "branch_weight"), Severity.WARNING),
        (("stem_weight", "stem_bias", "branch_weight", "branch_bias"), Severity.ERROR),
    ],
)
def test_an_error_for_more_than_half(names, severity):
    assert [item.severity for item in found(10, **dict.fromkeys(names, ZERO))] == [severity]


def test_told_once():
    assert len(found(500, branch_weight=NONE)) == 1


def role(**changes):
    return plan(SHAPES, {field: {name.replace("_", "."): value for name, value in many.items()} for field, many in changes.items()})


EXEMPT = {
    "frozen": role(trainable={"branch_weight": False}),
    "bias before a normalisation": role(role={"branch_weight": "bias-before-norm"}),
    "empty": role(shape={"branch_weight": (0, 8)}),
    "tied": role(tied_to={"branch_weight": "head.weight"}),
    "not held by the optimizer": plan(SHAPES, optimizer=Optimizer("optimizer", parameters=tuple(name for name in SHAPES if name != "branch.weight"))),
}


@pytest.mark.parametrize("facts", EXEMPT.values(), ids=EXEMPT.keys())
def test_quiet(facts):
    assert found(300, facts=facts, branch_weight=NONE) == []
    assert [item.subjects for item in found(300, facts=facts, branch_weight=NONE, head_weight=ZERO)] == [("head.weight",)]


EXPERTS = {"gate.weight": (4, 8), **{f"experts.{index}.{layer}.weight": shape for index in range(4) for layer, shape in ((0, (16, 8)), (2, (8, 16)))}}


@pytest.mark.parametrize("what", [NONE, ZERO])
def test_an_unused_expert_gets_200_samples(what):
    idle = {"experts_3_0_weight": what, "experts_3_2_weight": what}
    assert found(199, EXPERTS, **idle) == []
    (told,) = found(220, EXPERTS, **idle)
    assert (told.step, told.subjects) == (199, ("experts.3.0.weight", "experts.3.2.weight"))
    assert found(220, EXPERTS, experts_3_0_weight=[float(sample == 150) for sample in range(220)]) == []


def test_experts_that_are_all_unused_are_told_at_once():
    idle = {name.replace(".", "_"): NONE for name in EXPERTS if name.startswith("experts")}
    assert [(item.step, len(item.subjects)) for item in found(20, EXPERTS, **idle)] == [(9, 8)]


def test_a_stack_that_is_cut_off_is_no_conditional_part():
    """layers.0 to layers.2 have siblings that learn, but nothing before the cut gets a gradient."""
    shapes = {f"layers.{index}.weight": (8, 8) for index in range(6)}
    (told,) = found(20, shapes, layers_0_weight=ZERO, layers_1_weight=ZERO, layers_2_weight=ZERO)
    assert (told.step, told.subjects) == (9, ("layers.0.weight", "layers.1.weight", "layers.2.weight"))


def test_layers_of_unknown_place_get_the_benefit_of_the_doubt():
    shapes = {f"layers.{index}.weight": (8, 8) for index in range(6)}
    facts = plan(shapes, {"depth": dict.fromkeys(shapes, -1)})
    assert [item.step for item in found(220, shapes, facts, layers_0_weight=NONE)] == [199]


def test_siblings_have_one_shape_and_differ_in_one_number():
    shapes = {"gate.weight": (4, 8), "experts.0.weight": (8, 8), "experts.1.weight": (16, 8)}
    assert [item.step for item in found(20, shapes, experts_1_weight=NONE)] == [9]
    shapes = {"gate.weight": (4, 8), "a.0.b.0.weight": (8, 8), "a.1.b.1.weight": (8, 8)}
    assert [item.step for item in found(20, shapes, a_1_b_1_weight=NONE)] == [9]


def test_keras_counts_its_layers_by_type_which_makes_no_siblings():
    shapes = {"dense.kernel": (8, 8), "dense_1.kernel": (8, 8), "dense_2.kernel": (8, 8)}
    table = columns(20, shapes)
    table["gradient.abs_max"]["dense_2.kernel"] = [0.0] * 20
    assert [item.step for item in found(facts=plan(shapes, {"module_type": dict.fromkeys(shapes, "Dense")}), table=table)] == [9]
    renamed = {name.replace("dense", "expert"): shape for name, shape in shapes.items()}
    table = {key: {name.replace("dense", "expert"): values for name, values in many.items()} for key, many in table.items()}
    assert found(facts=plan(renamed, {"module_type": dict.fromkeys(renamed, "Dense")}), table=table) == []


def test_optimizers_that_step_in_turn():
    """Only the parameters of the optimizer that steps are in the table; each needs 10 samples of its own."""
    facts = plan({"gen.weight": (4, 4), "disc.weight": (4, 4)})
    run = []
    for step in range(40):
        name = ("gen.weight", "disc.weight")[step % 2]
        (one,) = snapshots(columns={"gradient.abs_max": {name: [0.0 if name == "disc.weight" else 1.0]}, "gradient.present": {name: [1.0]}})
        run.append(dataclasses.replace(one, step=step, applied=step + 1))
    assert [(item.step, item.subjects) for item in drive(MissingGradient(), run, facts)] == [(19, ("disc.weight",))]


def test_a_part_that_is_thawed_later_is_counted_from_then_on():
    rule = MissingGradient()
    run = snapshots(columns=columns(40, branch_weight=ZERO))
    assert drive(rule, run[:20], role(trainable={"branch_weight": False})) == []
    list(rule.begin(plan(SHAPES)))
    told = [item for snapshot in run[20:] for item in rule.check(snapshot)]
    assert [(item.step, item.first_step) for item in told] == [(29, 20)]


def test_the_state_is_plain():
    rule = MissingGradient()
    drive(rule, snapshots(columns=columns(5, branch_weight=NONE)), plan(SHAPES))
    assert json.loads(json.dumps(rule.state_dict())) == rule.state_dict()


def test_missing_evidence_is_said():
    rule = MissingGradient()
    assert rule.missing() == "0 of 10 samples"
    drive(rule, snapshots(columns=columns(3, branch_weight=ZERO)), plan(SHAPES))
    assert rule.missing() == "3 of 10 samples"
    healthy = MissingGradient()
    drive(healthy, snapshots(columns=columns(1)), plan(SHAPES))
    assert healthy.missing() == ""


# ---- what the autograd graph says


def disconnected(*names, severed=(), shapes=SHAPES):
    return dataclasses.replace(plan(shapes), disconnected=names, severed=severed)


def test_a_parameter_without_a_path_to_the_loss_is_told_whatever_was_sampled():
    (told,) = found(5, facts=disconnected("branch.weight"), branch_weight=NONE)
    assert (told.message, told.severity) == ("1 of 6 parameters have no path to the loss", Severity.WARNING)
    (told,) = found(5, facts=disconnected("branch.weight"), branch_weight=ZERO)
    assert told.evidence["without gradient"] == 1, "zeros that zero_grad(set_to_none=False) left"
    assert told.fixes[0] == "connect branch.weight to the loss"


def test_only_what_has_no_path_is_told_early():
    (told,) = found(5, facts=disconnected("branch.weight"), branch_weight=NONE, stem_weight=ZERO)
    assert told.subjects == ("branch.weight",)


def test_the_operation_that_cut_it_off_is_the_first_cause():
    cut = Severance("detach", "net", "model.py:12", ("branch.weight", "branch.bias"))
    (told,) = found(10, facts=disconnected("branch.weight", "branch.bias", severed=(cut,)), branch_weight=NONE, branch_bias=NONE)
    assert told.causes[0] == "detach at model.py:12"
    assert len(told.causes) == 3


def test_experts_without_a_path_may_still_be_used_later_unless_they_were_cut_off():
    shapes = {"stem.weight": (8, 4), "experts.0.weight": (8, 8), "experts.1.weight": (8, 8)}
    unused = {"experts.1.weight": NONE}
    assert found(30, shapes, disconnected("experts.1.weight", shapes=shapes), **unused) == []
    cut = Severance("detach", "", "model.py:12", ("experts.1.weight",))
    (told,) = found(30, shapes, disconnected("experts.1.weight", severed=(cut,), shapes=shapes), **unused)
    assert told.subjects == ("experts.1.weight",)

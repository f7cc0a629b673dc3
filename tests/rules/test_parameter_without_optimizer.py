from __future__ import annotations

import dataclasses

from tests.series import findings, plan, well_worded
from trainvet.finding import Severity
from trainvet.rules.parameter_without_optimizer import ParameterWithoutOptimizer, together
from trainvet.statistics import Optimizer

SHAPES = {
    "backbone.0.weight": (8, 4),
    "backbone.0.bias": (8,),
    "backbone.1.weight": (8, 8),
    "backbone.1.bias": (8,),
    "head.weight": (2, 8),
    "head.bias": (2,),
}
HEAD = ("head.weight", "head.bias")
TEACHER = {f"teacher.{name}": shape for name, shape in SHAPES.items()} | {f"student.{name}": shape for name, shape in SHAPES.items()}


def holding(*names, unknown=0, shapes=SHAPES, changes=None, **facts):
    """A plan whose optimizer holds just ``names``."""
    return dataclasses.replace(plan(shapes, changes, **facts), optimizers=(Optimizer("Adam", parameters=names, unknown_parameters=unknown),))


def found(facts):
    return findings(ParameterWithoutOptimizer(), facts=facts)


def test_every_parameter_owned_is_quiet():
    assert found(holding(*SHAPES)) == []


def test_a_module_without_an_optimizer_is_named_as_a_whole():
    (finding,) = found(holding(*HEAD))
    assert finding.severity is Severity.ERROR
    assert finding.where == "backbone (4 parameters: backbone.0.weight, …)"
    assert finding.subjects == ("backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias")
    assert "4 of 6 trainable parameters" in finding.message


def test_single_parameters_are_named_themselves():
    (finding,) = found(holding(*(name for name in SHAPES if name not in ("backbone.1.weight", "head.bias"))))
    assert finding.where == "backbone.1.weight, head.bias"


def test_one_tensor_left_out_is_enough():
    (finding,) = found(holding(*list(SHAPES)[:-1]))
    assert finding.subjects == ("head.bias",)


def test_several_optimizers_share_a_model():
    facts = plan(SHAPES, manual_optimization=True)
    both = (Optimizer("a", parameters=HEAD), Optimizer("b", parameters=tuple(name for name in SHAPES if name not in HEAD)))
    assert found(dataclasses.replace(facts, optimizers=both)) == []


def test_frozen_parameters_are_quiet():
    assert found(holding(*HEAD, changes={"trainable": {name: False for name in SHAPES if name not in HEAD}})) == []


def test_without_any_optimizer_there_is_no_verdict_and_it_is_said():
    for optimizers in ((), (Optimizer("unknown"),)):
        rule = ParameterWithoutOptimizer()
        assert list(rule.begin(dataclasses.replace(plan(SHAPES), optimizers=optimizers))) == []
        assert rule.missing() == "no optimizer is known"
    rule.begin(plan(SHAPES))
    assert not list(rule.begin(plan(SHAPES)))
    assert rule.missing() == ""


def test_a_teacher_or_target_network_is_info():
    student = tuple(name for name in TEACHER if name.startswith("student"))
    (finding,) = found(holding(*student, shapes=TEACHER))
    assert (finding.severity, finding.where) == (Severity.INFO, "teacher (6 parameters: teacher.backbone.0.weight, …)")
    assert "meant to stand still" in finding.causes[0]
    assert "freeze it" in finding.fixes[0]
    beside = {f"target.{name}": shape for name, shape in SHAPES.items()} | SHAPES
    assert [item.severity for item in found(holding(*SHAPES, shapes=beside))] == [Severity.INFO]
    other = {**TEACHER, "teacher.head.bias": (3,)}
    assert [item.severity for item in found(holding(*student, shapes=other))] == [Severity.ERROR]


def test_a_forgotten_block_among_its_like_is_no_copy():
    blocks = {f"blocks.{index}.{name}": shape for index in range(3) for name, shape in SHAPES.items()}
    (finding,) = found(holding(*(name for name in blocks if not name.startswith("blocks.1.")), shapes=blocks))
    assert (finding.severity, finding.where) == (Severity.ERROR, "blocks.1 (6 parameters: blocks.1.backbone.0.weight, …)")


def test_a_layer_that_happens_to_have_the_shape_of_another_is_no_copy():
    layers = {f"{layer}.{leaf}": shape for layer in ("hidden", "middle") for leaf, shape in (("weight", (8, 8)), ("bias", (8,)))}
    assert [item.severity for item in found(holding("hidden.weight", "hidden.bias", shapes=layers))] == [Severity.ERROR]


def test_linear_probing_of_a_loaded_model_is_info_and_a_forgotten_bias_is_not():
    assert [item.severity for item in found(holding(*HEAD, pretrained=True))] == [Severity.INFO]
    assert [item.severity for item in found(holding(*list(SHAPES)[:-1], pretrained=True))] == [Severity.ERROR]


def test_tensors_that_are_not_in_the_model():
    (finding,) = found(holding(*SHAPES, unknown=2))
    assert (finding.severity, finding.where) == (Severity.INFO, "Adam")
    stale = found(holding(unknown=6))
    assert [item.severity for item in stale] == [Severity.ERROR, Severity.ERROR]
    assert stale[0].where == "the whole model (6 parameters: backbone.0.weight, …)"
    assert "replaced" in stale[0].causes[0]
    assert "replaced" in stale[1].causes[0]


def test_of_a_changed_plan_only_what_is_new_is_told():
    rule = ParameterWithoutOptimizer()
    frozen = {"trainable": {"backbone.0.weight": False, "backbone.0.bias": False}}
    first = list(rule.begin(holding(*HEAD, changes=frozen)))
    assert [item.where for item in first] == ["backbone (2 parameters: backbone.1.weight, …)"]
    assert list(rule.begin(holding(*HEAD, changes=frozen))) == []
    restored = ParameterWithoutOptimizer()
    restored.load_state_dict(rule.state_dict())
    for again in (rule, restored):
        more = list(again.begin(holding(*HEAD)))
        assert [item.where for item in more] == ["backbone (2 parameters: backbone.0.weight, …)"]
        for finding in more:
            well_worded(finding)
    assert list(rule.begin(holding(*SHAPES))) == []
    assert [len(item.subjects) for item in rule.begin(holding(*HEAD))] == [4], "cleared, then wrong again"


def test_grouping():
    names = ["a.x.w", "a.x.b", "a.y.w", "c.w"]
    assert together(["a.x.w", "a.x.b"], names) == {"a.x": ["a.x.w", "a.x.b"]}
    assert together(["a.x.w"], names) == {"a.x.w": ["a.x.w"]}
    assert together(["a.x.w", "a.x.b", "a.y.w"], names) == {"a": ["a.x.w", "a.x.b", "a.y.w"]}
    assert together(names, names) == {"": names}

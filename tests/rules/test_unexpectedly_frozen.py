from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, well_worded
from trainvet.finding import Severity
from trainvet.rules.unexpectedly_frozen import UnexpectedlyFrozen, frozen_modules
from trainvet.statistics import Facts, Optimizer, Subject


def plan(frozen=(), free=(), **facts):
    """The optimizer holds all; frozen layers hold the weights they were built with."""
    shapes = {"weight": (8, 8), "bias": (8,)}
    subjects = [
        Subject(f"{module}.{kind}", "parameter", module, shape=shape, trainable=module in free)
        for module in (*frozen, *free)
        for kind, shape in shapes.items()
    ]
    optimizers = (Optimizer("SGD", parameters=tuple(subject.name for subject in subjects)),)
    return Facts(**{"subjects": tuple(subjects), "optimizers": optimizers, "initial": tuple(frozen), **facts})


def test_a_frozen_module_that_nothing_explains():
    facts = plan(("body.0", "body.1"), ("head",))
    facts = dataclasses.replace(
        facts, subjects=tuple(dataclasses.replace(item, shape=(*item.shape, 3)) if item.module == "head" else item for item in facts.subjects)
    )
    rule = UnexpectedlyFrozen()
    (found,) = rule.begin(facts)
    assert (found.code, found.severity, found.subjects) == ("MO101", Severity.WARNING, ("body",))
    assert "do not train" in found.message
    well_worded(found)
    assert list(rule.begin(facts)) == []


LEFT_OUT = {"optimizers": (Optimizer("SGD", parameters=("head.weight", "head.bias")),)}


@pytest.mark.parametrize("why", [{"pretrained": True}, {"finetuning": True}, {"resumed": True}, {"initial": ()}, LEFT_OUT])
def test_what_is_explained_is_information(why):
    facts = dataclasses.replace(plan(("body.0",), ("head",)), **why)
    facts = dataclasses.replace(
        facts, subjects=tuple(dataclasses.replace(item, shape=(*item.shape, 3)) if item.module == "head" else item for item in facts.subjects)
    )
    assert [item.severity for item in UnexpectedlyFrozen().begin(facts)] == [Severity.INFO]


@pytest.mark.parametrize(
    "facts",
    [
        plan((), ("body", "head")),
        plan(("body",), ()),
        Facts(),
        plan(("teacher.0", "teacher.1"), ("student.0", "student.1")),
    ],
)
def test_quiet(facts):
    assert list(UnexpectedlyFrozen().begin(facts)) == []


def test_a_single_frozen_bias_is_no_module():
    assert frozen_modules(["a.bias"], ["a.weight"]) == {}
    assert frozen_modules(["net.body.0.weight", "net.body.1.weight"], ["net.head.weight"]) == {"net.body": ["net.body.0.weight", "net.body.1.weight"]}


def test_what_freezes_during_the_run_is_information():
    rule = UnexpectedlyFrozen()
    assert list(rule.begin(plan((), ("body", "head")))) == []
    changed = plan(("body",), ("head",))
    changed = dataclasses.replace(
        changed, subjects=tuple(dataclasses.replace(item, shape=(3,)) if item.module == "head" else item for item in changed.subjects)
    )
    assert [item.severity for item in rule.begin(changed)] == [Severity.INFO]


def test_statistics_of_a_frozen_normalisation_that_drift():
    facts = Facts(
        subjects=(
            Subject("norm.weight", "parameter", "norm", shape=(8,), trainable=False),
            Subject("norm.running_mean", "buffer", "norm", shape=(8,)),
            Subject("head.weight", "parameter", "head", shape=(8, 8)),
            Subject("live.weight", "parameter", "live", shape=(8,)),
            Subject("live.running_mean", "buffer", "live", shape=(8,)),
        ),
        pretrained=True,
    )
    table = {"buffer.changed": {"norm.running_mean": "0, 1, 1, 1, 1", "live.running_mean": "0, 1, 1, 1, 1"}}
    found = [item for item in findings(UnexpectedlyFrozen(), None, table, facts) if "statistics" in item.message]
    assert [(item.step, item.severity, item.subjects) for item in found] == [(3, Severity.WARNING, ("norm",))]
    quiet = {"buffer.changed": {"norm.running_mean": "0, 1, 1, 0, 0"}}
    assert [item for item in findings(UnexpectedlyFrozen(), None, quiet, facts) if "statistics" in item.message] == []


def test_a_low_rank_addition_to_a_frozen_layer_is_information():
    frozen = plan(("body.0.layer",), ())
    added = Subject("body.0.up", "parameter", "body.0", shape=(8, 2))
    facts = dataclasses.replace(frozen, subjects=(*frozen.subjects, added))
    assert [item.severity for item in UnexpectedlyFrozen().begin(facts)] == [Severity.INFO]


def test_a_layer_like_its_neighbours_is_no_copy_of_them():
    facts = plan(("body.1",), ("body.0", "body.2"))
    assert [item.subjects for item in UnexpectedlyFrozen().begin(facts)] == [("body.1",)]

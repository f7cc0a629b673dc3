from __future__ import annotations

import dataclasses
import json

import pytest

from tests.series import drive, fresh, plan, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.severed_gradient import SeveredGradient
from trainvet.statistics import Facts, Layer, Optimizer, Severance

SHAPES = {"encoder.weight": (4, 4), "encoder.bias": (4,), "head.weight": (2, 4), "teacher.weight": (4, 4)}
CUT = Severance("detach", "encoder", "model.py:12", ("encoder.bias", "encoder.weight"))


def facts(*cuts, **more):
    held = Optimizer("Adam", "Adam", "adam", parameters=("encoder.weight", "encoder.bias", "head.weight"))
    return plan(SHAPES, optimizer=held, severed=cuts, **more)


def told(known):
    found = list(SeveredGradient().begin(known))
    for item in found:
        well_worded(item)
    return [(item.severity, item.subjects) for item in found]


BOTH = ("encoder.weight", "encoder.bias")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(CUT), [(Severity.ERROR, BOTH)]),
        (dataclasses.replace(facts(CUT), optimizers=()), [(Severity.ERROR, BOTH)]),
        (facts(dataclasses.replace(CUT, parameters=("encoder.bias",))), [(Severity.INFO, ("encoder.bias",))]),
        (facts(CUT, pretrained=True), [(Severity.INFO, BOTH)]),
        (facts(CUT, finetuning=True), [(Severity.INFO, BOTH)]),
        (facts(CUT, dataclasses.replace(CUT, parameters=("teacher.weight",))), [(Severity.ERROR, BOTH)]),
    ],
)
def test_fires(known, expected):
    assert told(known) == expected


FROZEN = dataclasses.replace(facts(CUT), subjects=tuple(dataclasses.replace(item, trainable=False) for item in facts().subjects))


@pytest.mark.parametrize(
    "known",
    [
        facts(),
        facts(dataclasses.replace(CUT, parameters=())),  # another way leads to the loss
        facts(dataclasses.replace(CUT, parameters=("teacher.weight",))),  # no optimizer holds it
        facts(dataclasses.replace(CUT, parameters=("unknown",))),
        FROZEN,
    ],
)
def test_quiet(known):
    assert told(known) == []


def test_the_message_names_operation_module_and_line():
    (found,) = SeveredGradient().begin(facts(CUT))
    assert found.message == "detach in encoder at model.py:12 ends the gradient: 2 of 3 trainable parameters never learn"
    assert found.fixes[0] == "remove detach() at model.py:12"
    assert (found.step, found.first_step) == (0, 0)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("torch.round", "straight through"),
        ("floor_divide", "straight through"),
        ("argmax", "gumbel_softmax"),
        ("long", "floating"),
        ("no_grad", "out of torch.no_grad()"),
        ("item", "no item()"),
        ("detach_()", "remove detach()"),
        ("bucketize", "take bucketize out of the way"),
    ],
)
def test_each_operation_has_its_remedy(operation, words):
    (found,) = SeveredGradient().begin(facts(dataclasses.replace(CUT, operation=operation)))
    well_worded(found)
    assert words in found.fixes[0]


def test_known_later_and_told_once_even_after_a_restart():
    rule = SeveredGradient()
    assert list(rule.begin(facts())) == []
    assert len(list(rule.begin(facts(CUT)))) == 1
    assert list(rule.begin(facts(CUT))) == []
    other = fresh(rule)
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert len(list(other.begin(facts(CUT, dataclasses.replace(CUT, source="model.py:30"))))) == 1


def test_seen_late_it_began_with_the_missing_gradients():
    rule = SeveredGradient()
    present = {name: [0.0 if name in BOTH else 1.0] * 6 for name in SHAPES}
    run = snapshots(None, {"gradient.present": present}, at=range(4, 10))
    assert drive(rule, run[:-1], facts()) == []
    assert list(rule.begin(facts(CUT))) == []
    (found,) = rule.check(run[-1])
    assert (found.step, found.first_step) == (9, 4)
    assert list(rule.end(10)) == []
    assert json.loads(json.dumps(rule.state_dict()))["since"]["first"] == [4.0, 4.0, -1.0, -1.0]


def test_what_the_last_step_shows_is_told_at_the_end():
    rule = SeveredGradient()
    run = snapshots(None, {"gradient.present": {name: [0.0 if name in BOTH else 1.0] * 6 for name in SHAPES}})
    assert drive(rule, run, facts()) == []
    assert list(rule.begin(facts(CUT))) == []
    (found,) = rule.end(6)
    assert (found.step, found.first_step) == (6, 0)


def test_missing_evidence_is_said():
    rule = SeveredGradient()
    list(rule.begin(Facts()))
    assert rule.missing() == "no traced step"
    list(rule.begin(facts(layers=(Layer("head"),))))
    assert rule.missing() == ""

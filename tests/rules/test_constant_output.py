from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.constant_output import ConstantOutput
from trainvet.statistics import Facts, Subject

SITES = tuple(Subject(name, "activation", name, "Linear", depth=depth, shape=(32, 16)) for depth, name in enumerate("abc"))
PLAN = Facts(framework="none", subjects=(*SITES, Subject("output", "output", shape=(32, 4))))
W, E, INFO = Severity.WARNING, Severity.ERROR, Severity.INFO


def columns(a="0 x9", b="0 x9", c="0 x9", output="0 x9", inputs="1 x9", labels="1 x9"):
    return {
        "activation.constant": {"a": a, "b": b, "c": c},
        "output.constant": {"output": output},
        "input.std": {"input": inputs},
        "label.std": {"label": labels},
    }


def told(facts=PLAN, **written):
    return [(item.step, item.severity, item.subjects) for item in findings(ConstantOutput(), None, columns(**written), facts)]


def test_a_constant_prediction_is_an_error_after_five_samples():
    assert told(output="1 x9") == [(4, E, ("output",))]
    assert told(output="1 x4, 0, 1 x4") == []


def test_the_first_layer_of_the_constant_stretch_is_named():
    found = findings(ConstantOutput(), None, columns(b="1 x9", c="1 x9", output="1 x9"), PLAN)
    assert [(item.severity, item.subjects) for item in found] == [(E, ("b", "output")), (W, ("b", "c"))]
    assert found[0].message == "b and all behind it give the same for every sample of the batch on 5 samples in a row"


def test_a_layer_that_told_samples_apart_before():
    assert told(b="0 x2, 1 x7") == [(6, W, ("b",))]
    assert told(b="0 x2, 1 x4, 0, 1 x2") == []


def test_a_layer_that_never_saw_the_samples_is_information():
    assert told(a="1 x9") == [(4, INFO, ("a",))]
    assert told(a="1 x9", output="1 x9") == [(4, E, ("output",)), (4, INFO, ("a",))], "what comes behind it differs"


@pytest.mark.parametrize("written", [{"inputs": "0 x9"}, {"labels": "0 x9"}])
def test_batches_that_are_constant_themselves_give_no_verdict(written):
    assert told(b="0 x2, 1 x7", output="1 x9", **written) == []


@pytest.mark.parametrize("change", [{"role": "gate"}, {"role": "expert"}, {"shape": (1, 16)}, {"shape": ()}])
def test_gates_experts_and_single_samples_are_not_judged(change):
    facts = dataclasses.replace(PLAN, subjects=tuple(dataclasses.replace(item, **change) for item in SITES))
    assert told(facts, b="0 x2, 1 x7") == []


def test_what_flickers_is_one_episode():
    once, twice = "1 x5, 0 x4, 1 x5", "1 x5, 0 x5, 1 x5"
    long = {"a": "0 x20", "b": "0 x20", "c": "0 x20", "inputs": "1 x20", "labels": "1 x20"}
    assert [len(told(output=written, **long)) for written in (once, twice)] == [1, 2]
    assert [len(told(**{**long, "output": "0 x20", "b": f"0, {written}"})) for written in (once, twice)] == [1, 2]


def test_causes_fit_the_evidence():
    died = findings(ConstantOutput(), None, columns(b="0 x2, 1 x7"), PLAN)[0]
    assert died.causes[0].startswith("the units in front of it are dead")
    never = findings(ConstantOutput(), None, columns(output="1 x9"), PLAN)[0]
    assert never.causes[0].startswith("the input does not reach")


def test_nan_gives_no_verdict_and_coverage_counts():
    nan = [float("nan")] * 9
    assert told(a=nan, b=nan, c=nan, output=nan) == []
    rule = ConstantOutput()
    drive(rule, snapshots(None, columns(a="0 x3", b="0 x3", c="0 x3", output="0 x3", inputs="1 x3", labels="1 x3")), PLAN)
    assert rule.missing() == "3 of 5 samples with inputs and labels that differ"

from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.all_zero_output import AllZeroOutput
from trainvet.statistics import Subject

SITE = Subject("fc", "activation", "fc", "Linear", depth=2, shape=(32, 64))
BASE = plan({"fc.weight": (64, 8), "head.weight": (2, 64)})
PLAN = dataclasses.replace(BASE, subjects=(*BASE.subjects, SITE))


def columns(top, gradient="1e-3 x30"):
    return {"activation.abs_max": {"fc": top}, "gradient.abs_max": {"fc.weight": gradient, "head.weight": "1e-3 x30"}}


def told(top, facts=PLAN, **more):
    return [(item.step, item.first_step, item.severity) for item in findings(AllZeroOutput(), None, columns(top, **more), facts)]


def with_site(**changes):
    return dataclasses.replace(BASE, subjects=(*BASE.subjects, dataclasses.replace(SITE, **changes)))


def test_five_samples_from_step_ten_on():
    assert told("0 x30") == [(13, 9, Severity.WARNING)]
    assert told("0 x13") == []
    assert told("1 x20, 0 x10") == [(24, 20, Severity.WARNING)]
    assert told("1 x20, 0 x4, 1e-30, 0 x4, 1") == []


def test_what_flickers_is_one_episode():
    assert [len(told(f"1 x10, 0 x5, 1 x{fine}, 0 x5")) for fine in (4, 5)] == [1, 2]


def test_a_branch_that_starts_at_zero_is_healthy():
    assert told("0 x10, 1e-6 x20") == []


def test_no_gradient_either_is_an_error():
    found = findings(AllZeroOutput(), None, columns("0 x30", gradient="0 x30"), PLAN)
    assert [item.severity for item in found] == [Severity.ERROR]
    assert "so are the gradients" in found[0].message
    assert found[0].fixes[0].startswith("initialise the module's weights")


QUIET = {
    "a gate": {"role": "gate"},
    "an expert by role": {"role": "expert"},
    "an expert by name": {"name": "experts.3.fc"},
    "a dropped path": {"module_type": "DropPath"},
    "a mask": {"module_type": "CausalMask"},
    "few units": {"shape": (32, 7)},
    "a number": {"shape": ()},
}


@pytest.mark.parametrize("change", QUIET.values(), ids=QUIET)
def test_quiet(change):
    name = change.get("name", "fc")
    facts = with_site(**change)
    assert findings(AllZeroOutput(), None, {"activation.abs_max": {name: "0 x30"}}, facts) == []


def test_a_frozen_module_is_meant_to_be_as_it_is():
    frozen = plan({"fc.weight": (64, 8)}, {"trainable": {"fc.weight": False}})
    assert told("0 x30", dataclasses.replace(frozen, subjects=(*frozen.subjects, SITE))) == []


def test_an_activation_without_parameters_is_a_warning():
    found = findings(AllZeroOutput(), None, {"activation.abs_max": {"act": "0 x30"}}, with_site(name="act", module="act", module_type="ReLU"))
    assert [(item.severity, item.causes[0][:10]) for item in found] == [(Severity.WARNING, "every unit")]


def test_nan_gives_no_verdict_and_coverage_counts():
    assert told([float("nan")] * 30) == []
    rule = AllZeroOutput()
    drive(rule, snapshots(None, columns("1 x3")), PLAN)
    assert rule.missing() == "3 of 5 samples"

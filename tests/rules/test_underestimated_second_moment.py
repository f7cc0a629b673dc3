from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.underestimated_second_moment import UnderestimatedSecondMoment
from trainvet.statistics import Optimizer

SHAPES = {"a.weight": (4, 4), "b.weight": (4, 4)}
PLAN = plan(SHAPES, optimizer=Optimizer("Adam", "Adam", "adam", 1e-8, betas=(0.9, 0.99)))  # a memory of 100 steps


def told(written, facts=PLAN, start=100):
    columns = {"update.moment_ratio": {"a.weight": written, "b.weight": [1.0] * len(written)}}
    found = findings(UnderestimatedSecondMoment(), None, columns, facts, at=range(start, start + len(written)))
    return [(item.step, item.first_step, item.severity, item.subjects) for item in found]


@pytest.mark.parametrize(
    ("ratios", "step"),
    [
        ([2.31, 2.31, 1.0], 101),
        ([2.29, 2.29, 2.29], None),
        ([2.31, 1.0, 2.31, 1.0], None),
        ([1.0, 9.0, 9.0, 9.0], 102),
        ([float("nan")] * 4, None),
        ([float("inf")] * 4, None),
    ],
)
def test_two_samples_in_a_row(ratios, step):
    assert told(ratios) == ([(step, step - 1, Severity.INFO, ("a.weight",))] if step else [])


def test_after_the_memory_of_adam():
    assert told([9.0] * 4, start=98) == [(101, 100, Severity.INFO, ("a.weight",))]
    assert told([9.0] * 4, start=90) == []


def test_adam_only():
    assert told([9.0] * 4, plan(SHAPES, optimizer=Optimizer("SGD", "SGD", "sgd"))) == []


def test_the_advice_names_beta2():
    columns = {"update.moment_ratio": {"a.weight": [9.0] * 2}}
    (found,) = findings(UnderestimatedSecondMoment(), None, columns, PLAN, at=(200, 250))
    assert found.fixes[0] == "lower beta2 to 0.95 (now 0.99)"
    low = dataclasses.replace(PLAN, optimizers=(dataclasses.replace(PLAN.optimizers[0], betas=(0.9, 0.95)),))
    assert "update" in findings(UnderestimatedSecondMoment(), None, columns, low, at=(200, 250))[0].fixes[0]


def test_missing_evidence_is_said():
    rule = UnderestimatedSecondMoment()
    drive(rule, snapshots(None, {"update.moment_ratio": {"a.weight": [1.0] * 50}}), PLAN)
    assert rule.missing() == "0 of 2 samples after step 100"
    drive(rule, snapshots(None, {"update.moment_ratio": {"a.weight": [1.0] * 2}}, at=(200, 201)), PLAN)
    assert rule.missing() == ""

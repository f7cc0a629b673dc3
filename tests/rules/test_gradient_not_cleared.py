from __future__ import annotations

import pytest

from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.gradient_not_cleared import GradientNotCleared
from trainvet.statistics import Facts, Optimizer


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        ("0, 1 x20", [2]),
        ("0, _ x5, 1, _ x5, 1, _ x5", [12]),  # sampled now and then
        ("0 x9, 1, 0, 1, 0", []),
        ("0 x50", []),
        ("0, 1", []),
        ("0, 1 x3, 0, 1 x3", [2, 6]),  # an episode of its own
    ],
)
def test_two_cycles_in_a_row(written, steps):
    assert [step for step, code in run(GradientNotCleared(), {"run.stale_gradient": written}) if code == "GR106"] == steps


def test_nan_gives_no_verdict():
    assert drive(GradientNotCleared(), snapshots({"run.stale_gradient": "nan x9"})) == []


def test_it_is_an_error_from_the_first_cycle_on():
    (found,) = findings(GradientNotCleared(), {"run.stale_gradient": "0, 1 x20"})
    assert (found.severity, found.first_step) == (Severity.ERROR, 1)


@pytest.mark.parametrize("facts", [Facts(optimizers=(Optimizer("d"), Optimizer("g"))), Facts(manual_optimization=True)])
def test_information_where_gradients_may_be_another_optimizers(facts):
    (found,) = findings(GradientNotCleared(), {"run.stale_gradient": "0, 1 x20"}, facts=facts)
    assert found.severity == Severity.INFO


def test_missing_evidence_is_said():
    rule = GradientNotCleared()
    assert rule.missing() == "0 of 2 cycles"
    drive(rule, snapshots({"run.stale_gradient": "0 x2"}))
    assert rule.missing() == ""

from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.unsettled_running_statistics import UnsettledRunningStatistics
from trainvet.statistics import Facts


def left(written):
    return {"validation_module.unsettled": {"norm": written}}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([0.049, 0.049], []),
        ([0.051, 0.01], [(0, Severity.INFO)]),
        ([0.9, 0.5, 0.2], [(0, Severity.INFO), (1, Severity.WARNING)]),
        ([0.01, 0.01, float("nan")], []),
    ],
)
def test_two_evaluations_in_a_row(written, expected):
    assert [(item.step, item.severity) for item in findings(UnsettledRunningStatistics(), None, left(written))] == expected


def test_the_last_evaluation_counts_by_itself():
    for written, expected in (([0.06], [Severity.WARNING]), ([0.06, 0.04], []), ([0.9, 0.9], [])):
        rule = UnsettledRunningStatistics()
        drive(rule, snapshots(None, left(written)))
        assert [item.severity for item in rule.end(9)] == expected


@pytest.mark.parametrize(("planned", "expected"), [(3, Severity.WARNING), (4, Severity.INFO), (None, Severity.WARNING)])
def test_early_evaluations_of_a_run_long_enough_to_settle_are_information(planned, expected):
    # 0.2 is left after the second of the planned steps: 0.2 ** 1.5 = 0.09 at the third, 0.2 ** 2 = 0.04 at the fourth
    rule = UnsettledRunningStatistics()
    assert drive(rule, snapshots(None, left([0.45, 0.2])), Facts(planned_steps=planned))[-1].severity == expected


@pytest.mark.parametrize("facts", [Facts(pretrained=True), Facts(resumed=True)])
def test_loaded_statistics_are_settled(facts):
    rule = UnsettledRunningStatistics()
    assert drive(rule, snapshots(None, left([0.9] * 5)), facts) == []
    assert rule.missing() == "not judged: statistics were loaded"


def test_words_and_coverage():
    found = findings(UnsettledRunningStatistics(), None, left([0.6, 0.5]))[-1]
    assert (found.code, found.first_step, found.subjects) == ("MO109", 0, ("norm",))
    assert "50% their initial values" in found.message
    assert UnsettledRunningStatistics().missing() == "an evaluation with a batch normalisation in evaluation mode"

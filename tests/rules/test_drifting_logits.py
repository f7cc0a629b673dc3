from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.drifting_logits import DriftingLogits

AT = tuple(range(0, 8000, 200))  # five samples a window


def told(values):
    found = findings(DriftingLogits(), None, {"output.log_normalizer": {"output": values}}, at=AT)
    return [(item.step, item.first_step, item.severity) for item in found]


def test_three_windows_above_three_times_the_first():
    assert told("8 x5, 25 x20") == [(4000, 1000, Severity.INFO)]
    assert told("8 x5, 25 x15") == [], "the third window has not ended"
    assert told("8 x5, 25 x10, 8 x5, 25 x10") == []


@pytest.mark.parametrize(("first", "later", "fires"), [(8, 23.9, 0), (8, 24.1, 1), (2, 19.9, 0), (2, 20.1, 1)])
def test_limits(first, later, fires):
    assert len(told(f"{first} x5, {later} x20")) == fires


def test_told_once_an_outlier_is_no_drift_and_nan_gives_no_verdict():
    assert len(told("8 x5, 25..99 x35")) == 1
    assert told("8 x5, 8, 8, 8, 900, 900, 8, 8, 8, 900, 900, 8, 8, 8, 900, 900, 8 x15") == []
    assert told([float("nan")] * 40) == []


def test_coverage_counts_windows():
    rule = DriftingLogits()
    drive(rule, snapshots(None, {"output.log_normalizer": {"output": "8 x12"}}, at=AT))
    assert rule.missing() == "2 of 4 windows of 1000 steps"

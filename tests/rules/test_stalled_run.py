from __future__ import annotations

import numpy as np
import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rule import build
from trainvet.rules.stalled_run import StalledRun
from trainvet.statistics import Snapshot, Track


def test_a_step_that_took_too_long_is_told_once():
    written = {"run.step_seconds": {0: 0.1, 1: 1799.0, 2: 1800.0, 3: 0.1}}
    assert run(StalledRun(), written) == [(2, "RN102")]
    (found,) = findings(StalledRun(), written)
    assert (found.severity, found.evidence["seconds"]) == (Severity.WARNING, 1800.0)


def test_what_the_watchdog_told_of_a_step_is_not_told_again():
    rule = StalledRun(seconds=5)
    found = rule.stalled(2, 6.0, "recv (connection.py:1)", "stacks.txt")
    assert (found.code, found.step, found.evidence["stacks"]) == ("RN102", 2, "stacks.txt")
    again = StalledRun(seconds=5)
    again.load_state_dict(rule.state_dict())
    steps = np.array([1, 2, 3])
    track = Track(steps, steps, np.array([0.1, 6.5, 6.5]))
    assert [item.step for item in again.check(Snapshot(3, 3, series={"run.step_seconds": {"run": track}}))] == [3]


def test_a_time_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        build(StalledRun, {"seconds": 0.0})
    assert StalledRun().missing() == "a step that was timed"

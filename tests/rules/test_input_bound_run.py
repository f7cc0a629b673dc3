from __future__ import annotations

import numpy as np
import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.input_bound_run import InputBoundRun
from trainvet.statistics import Facts


def told(seconds, wait="0 x900", facts=None):
    found = findings(InputBoundRun(), {"run.step_seconds": seconds, "run.wait_seconds": wait}, facts=facts)
    return [(item.step, item.message.split()[2]) for item in found]


@pytest.mark.parametrize(
    ("seconds", "wait", "expected"),
    [
        ("1 x200", "0.21 x200", [(199, "the")]),
        ("1 x200", "0.19 x200", []),
        ("1 x199", "0.5 x199", []),
        ("1 x200", "9 x20, 0.1 x180", []),  # the first 20 steps do not count
        ("1 x600", "0.5 x600", [(199, "the")]),
        ("1 x600", "0.5 x200, 0 x200, 0.5 x200", [(199, "the"), (599, "the")]),
        ("1 x190, 2.1 x10", "0 x200", [(199, "180")]),
        ("1 x191, 2.1 x9", "0 x200", []),
        ("1 x190, 1.9 x10", "0 x200", []),  # not twice as long
        ("5 x20, 1 x180", "0 x200", []),
        ("0.002 x150, 0.04 x50", "0 x200", []),  # a busy machine, not the run
        ("0.002 x150, 0.06 x50", "0 x200", [(199, "180")]),
        ("0.1 x150, 0.21 x50", "0 x200", [(199, "180")]),
        ("nan x200", "nan x200", []),
        ("0 x200", "0 x200", []),
    ],
)
def test_stretches_of_200_steps(seconds, wait, expected):
    assert told(seconds, wait) == expected


def test_six_deviations():
    values = np.tile([1.0, 1.3, 0.7], 70)
    values[100:110] = 2.7
    assert told(values[:200]) == []
    values[100:110] = 2.9
    assert told(values[:200]) == [(199, "180")]


def test_it_is_information_with_a_remedy_of_the_framework():
    both = {"run.step_seconds": "1 x200", "run.wait_seconds": "0.5 x200"}
    (found,) = findings(InputBoundRun(), both, facts=Facts("keras"))
    assert (found.severity, found.first_step) == (Severity.INFO, 20)
    assert "prefetch" in found.fixes[0]
    assert found.message == "50% of the time of 180 steps was spent waiting for data"
    assert "num_workers" in findings(InputBoundRun(), both, facts=Facts("torch"))[0].fixes[0]


def test_without_waiting_times_only_the_steps_are_judged():
    assert drive(InputBoundRun(), snapshots({"run.step_seconds": "1 x400"})) == []
    assert drive(InputBoundRun(), snapshots({"run.wait_seconds": "1 x400"})) == []


def test_missing_evidence_is_said():
    rule = InputBoundRun()
    assert rule.missing() == "0 of 200 steps"
    drive(rule, snapshots({"run.step_seconds": "1 x200"}))
    assert rule.missing() == ""

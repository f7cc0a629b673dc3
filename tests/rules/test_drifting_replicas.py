from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.rules.drifting_replicas import DriftingReplicas


def difference(written):
    return {"run.replica_difference": written}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({0: 0, 1000: 0, 2000: 0}, []),
        ({0: 0, 1000: 1e-9, 2000: 3}, [(1000, "MO105")]),
        ({0: 1}, [(0, "MO105")]),
        ({0: float("nan")}, [(0, "MO105")]),
        ({0: 1, 10: 0, 20: 1}, [(0, "MO105"), (20, "MO105")]),
    ],
)
def test_any_difference_is_told_once_until_they_are_equal_again(written, expected):
    assert run(DriftingReplicas(), difference(written)) == expected


def test_it_names_the_last_step_at_which_all_were_equal():
    (found,) = findings(DriftingReplicas(), difference({0: 0, 1000: 0, 2000: 0.5}))
    assert (found.first_step, found.evidence["last equal step"]) == (1001, 1000)
    assert DriftingReplicas().missing() == "a comparison of the processes"

from __future__ import annotations

import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.series import snapshots
from trainvet.rolling import Rollings
from trainvet.statistics import Snapshot, Track

LOSS = "loss.value"


def windows(run, stride, size):
    """(number of rows so far, rows of the window and the ``size`` before it) at each end of a window."""
    kept = Rollings(size)
    out = []
    for snapshot in run:
        for _, rolling, fresh in kept.add(snapshot, LOSS):
            for end in rolling.windows(fresh, stride):
                assert rolling.total(end) == int(rolling.steps[end - 1]) + 1
                out.append((rolling.steps[:end][-stride:].tolist(), rolling.values[max(0, end - size - 1) : end].tolist()))
    return out


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 60))
def test_windows_do_not_depend_on_the_blocks(blocks, stride, more):
    total, size = sum(blocks), stride + more
    values = np.arange(total, dtype=float) ** 2
    edges = np.cumsum([0, *blocks])
    steps = np.arange(total)
    run = [
        Snapshot(int(b) - 1, int(b), series={LOSS: {"loss": Track(steps[a:b], steps[a:b] + 1, values[a:b])}}) for a, b in itertools.pairwise(edges)
    ]
    expected = [(steps[end - stride : end].tolist(), values[max(0, end - size - 1) : end].tolist()) for end in range(stride, total + 1, stride)]
    assert windows(run, stride, size) == expected


def test_skipped_steps_are_no_rows_unless_asked_for():
    run = snapshots({LOSS: "0..9 x10", "run.skipped": "0 x3, 1 x4, 0 x3"}, block=4)
    rows = [
        [step for snapshot in run for _, rolling, fresh in kept.add(snapshot, LOSS, skipped=every) for step in rolling.steps[-fresh:].tolist()]
        for kept, every in ((Rollings(9), False), (Rollings(9), True))
    ]
    assert rows == [[0, 1, 2, 7, 8, 9], list(range(10))]


def test_a_step_skipped_at_the_very_start_is_no_row():
    kept = Rollings(9)
    assert [fresh for snapshot in snapshots({LOSS: "1 x3", "run.skipped": "1 x2, 0"}, block=1) for _, _, fresh in kept.add(snapshot, LOSS)] == [1]


def test_each_subject_has_its_own_rows_and_numbers():
    kept = Rollings(5, told=[])
    for snapshot in snapshots({LOSS: {"a": "1 x7", "b": "2 x3"}}, block=2):
        for name, rolling, _ in kept.add(snapshot, LOSS):
            rolling.kept["told"].append(name)
    assert [set(rolling.kept["told"]) for rolling in kept.all()] == [{"a"}, {"b"}]
    assert kept.longest == 7


def test_memory_is_bounded_and_survives_a_round_trip():
    kept, again = Rollings(6, best=1.5), Rollings(6, best=0.0)
    for snapshot in snapshots({LOSS: "0..999 x1000"}, block=50):
        for _, rolling, fresh in kept.add(snapshot, LOSS):
            assert len(rolling.values) <= 6 + fresh
    again.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    assert again.state_dict() == kept.state_dict()
    assert len(again.all()[0].values) == 6
    assert again.longest == 1000

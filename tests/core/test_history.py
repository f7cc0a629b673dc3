from __future__ import annotations

import numpy as np
import pytest

from tests.series import snapshots
from trainvet.history import CELLS, Recorder
from trainvet.statistics import Snapshot, Table, Track


def recorded(limit, *many):
    recorder = Recorder(limit)
    for snapshot in many:
        recorder.add(snapshot)
    return recorder


def test_a_series_and_a_table_come_back_as_they_were():
    run = snapshots({"loss.value": "3, 2, 1, nan"}, {"gradient.norm": {"a": "1 x2", "b": "2, 4"}}, at=(0, 3))
    recorder = recorded(100, *run)
    loss = recorder.get("loss.value")
    assert loss.steps.tolist() == [0, 1, 2, 3]
    assert loss.subjects == ("loss",)
    np.testing.assert_array_equal(loss.values[:, 0], [3, 2, 1, np.nan])
    norm = recorder.get("gradient.norm")
    assert (norm.steps.tolist(), norm.subjects) == ([0, 3], ("a", "b"))
    assert norm.values.tolist() == [[1, 2], [1, 4]]


def test_memory_is_bounded_and_the_whole_run_stays_covered():
    recorder = recorded(64, *snapshots({"loss.value": np.arange(5000)}, block=7))
    loss = recorder.get("loss.value")
    assert 32 <= len(loss.steps) <= 64
    assert loss.steps[0] == 0
    assert loss.steps[-1] > 4800
    assert len(set(np.diff(loss.steps))) == 1, "evenly spaced"
    np.testing.assert_array_equal(loss.values[:, 0], loss.steps)


def test_one_long_track_is_thinned_at_once():
    track = Track(np.arange(1000), np.arange(1000), np.arange(1000.0))
    assert len(recorded(64, Snapshot(999, 999, series={"loss.value": {"loss": track}})).get("loss.value").steps) <= 64


def test_two_losses_that_take_turns_are_both_kept():
    """Every second row of a common list would be all rows of one of them."""
    turns = {"loss.value": {"a": dict.fromkeys(range(0, 800, 2), 1.0), "b": dict.fromkeys(range(1, 800, 2), 2.0)}}
    history = recorded(50, *snapshots(turns, block=1)).get("loss.value")
    assert history.subjects == ("a", "b")
    kept = (~np.isnan(history.values)).sum(axis=0)
    assert kept.min() >= 25
    assert kept.max() <= 50


def test_tables_of_optimizers_that_take_turns_are_both_kept():
    many = [
        Snapshot(step, step, tables={"gradient": Table(("a", "b") if step % 2 else ("c",), {"norm": np.ones(1 + step % 2)})}) for step in range(400)
    ]
    history = recorded(50, *many).get("gradient.norm")
    assert set(history.subjects) == {"a", "b", "c"}
    assert (~np.isnan(history.values)).sum(axis=0).min() >= 25


def test_many_subjects_leave_fewer_rows():
    names = tuple(str(index) for index in range(CELLS // 10))
    many = [Snapshot(step, step, tables={"gradient": Table(names, {"norm": np.ones(len(names))})}) for step in range(25)]
    assert len(recorded(2048, *many).get("gradient.norm").steps) <= 10


def test_a_subject_that_joins_later_is_nan_before():
    first = Snapshot(0, 1, tables={"weight": Table(("a",), {"rms": np.array([1.0])})})
    later = Snapshot(50, 51, tables={"weight": Table(("a", "b"), {"rms": np.array([2.0, 3.0])})})
    history = recorded(10, first, later).get("weight.rms")
    np.testing.assert_array_equal(history.values, [[1, np.nan], [2, 3]])


def test_unknown_and_unmeasured_statistics():
    with pytest.raises(KeyError, match=r"unknown statistic 'gradient\.nrom'"):
        Recorder().get("gradient.nrom")
    empty = Recorder().get("gradient.norm")
    assert (empty.steps.size, empty.subjects, empty.values.shape) == (0, (), (0, 0))

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.series import plan, snapshots
from trainvet.poison import Poison, counts

SHAPES = {"a.weight": (4, 4), "frozen": (4,)}
FINE = {"weight.nan": {"a.weight": "0 x9"}, "gradient.norm": {"a.weight": "1 x9"}}


def clean(tracks, columns=None, at=None, block=3):
    poison = Poison()
    poison.begin(plan(SHAPES, {"trainable": {"frozen": False}}))
    run = snapshots(tracks, columns, at, block=block)
    return run, [poison.clean(snapshot) for snapshot in run], poison


def steps(seen, key):
    return [step for snapshot in seen if snapshot is not None for track in snapshot.tracks(key).values() for step in track.steps.tolist()]


def test_a_finite_run_is_handed_on_untouched():
    run, seen, poison = clean({"loss.value": "1 x9"}, FINE)
    assert all(first is second for first, second in zip(run, seen, strict=True))
    assert poison.since is None


@pytest.mark.parametrize("key", ["loss.value", "run.gradient_norm"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_from_the_first_bad_step_on_nothing_is_handed_on(key, bad):
    tracks = {"loss.value": "1 x9", "optimizer.learning_rate": "0.1 x9"} | {key: f"1 x4, {bad}, 1 x4"}
    _, seen, poison = clean(tracks)
    assert poison.since == 4
    assert steps(seen, "loss.value") == [0, 1, 2, 3]
    assert steps(seen, "optimizer.learning_rate") == [0, 1, 2, 3]
    assert seen[2] is None


def test_a_sampled_snapshot_with_a_bad_step_before_it_loses_its_tables():
    _, seen, _ = clean({"loss.value": "1 x4, nan, 1 x4"}, {"gradient.norm": {"a.weight": "1"}}, at=(5,), block=6)
    assert seen[0].tables == {}
    assert steps(seen[:1], "loss.value") == [0, 1, 2, 3]


def test_a_bad_weight_or_buffer_is_poison_although_the_loss_is_finite():
    for key in ("weight.nan", "weight.inf"):
        assert clean({"loss.value": "1 x9"}, {key: {"a.weight": "0 x4, 1 x5"}})[2].since == 4
    assert clean({"loss.value": "1 x9"}, {"buffer.nonfinite": {"running_mean": "0 x4, 1 x5"}})[2].since == 4


def test_masks_are_no_poison():
    _, seen, poison = clean({"loss.value": "1 x9"}, {"buffer.nonfinite": {"mask": "6 x9"}, "weight.inf": {"frozen": "6 x9", "a.weight": "0 x9"}})
    assert poison.since is None
    assert all(snapshot is not None and snapshot.tables for snapshot in seen)


def test_a_trainable_weight_that_is_bad_from_the_start_is_poison():
    assert clean({"loss.value": "1 x9"}, {"weight.inf": {"a.weight": "6 x9"}})[2].since == 0


def test_a_mask_that_joins_later_is_none_and_one_that_was_finite_is_poison():
    poison = Poison()
    one = snapshots(None, {"buffer.nonfinite": {"mask": "0"}})[0]
    two = snapshots(None, {"buffer.nonfinite": {"mask": "0 x2", "late": "6 x2"}})[1]
    three = snapshots(None, {"buffer.nonfinite": {"mask": "1 x3", "late": "6 x3"}})[2]
    assert [poison.clean(item) is not None and poison.since is None for item in (one, two, three)] == [True, True, False]


def test_it_ends_with_a_sampled_snapshot_that_is_finite():
    table = {"weight.nan": {"a.weight": [0.0, 1.0, 0.0]}}
    _, seen, poison = clean({"loss.value": "1 x2, nan, 1 x6"}, table, at=(0, 3, 7), block=2)
    assert poison.since is None
    assert [snapshot.step for snapshot in seen if snapshot is not None and snapshot.tables] == [0, 7]
    assert steps(seen, "loss.value")[-1] == 8


def test_series_alone_do_not_end_it():
    _, seen, poison = clean({"loss.value": "1 x2, nan, 1 x6"})
    assert poison.since == 2
    assert seen[-1] is None


def test_a_skipped_step_leaves_no_poison_but_its_rows_are_left_out():
    tracks = {"loss.value": "1 x4, nan, 1 x4", "run.gradient_norm": "1 x4, inf, 1 x4", "run.skipped": "0 x4, 1, 0 x4"}
    _, seen, poison = clean(tracks, FINE)
    assert poison.since is None
    assert steps(seen, "loss.value") == [0, 1, 2, 3, 5, 6, 7, 8]
    assert steps(seen, "run.skipped") == list(range(9))
    assert [snapshot.step for snapshot in seen if not snapshot.tables] == [4]
    assert all(math.isfinite(value) for snapshot in seen for track in snapshot.tracks("run.gradient_norm").values() for value in track.values)


def test_a_skipped_step_does_not_keep_the_poison_alive():
    tracks = {"loss.value": "1, nan, 1 x7", "run.gradient_norm": "1 x4, inf, 1 x4", "run.skipped": "0 x4, 1, 0 x4"}
    assert clean(tracks, {"weight.nan": {"a.weight": "0"}}, at=(5,), block=5)[2].since is None


def test_counts_add_up_and_leave_zeros_out():
    snapshot = snapshots(None, {"gradient.nan": {"a": "1", "b": "0", "c": "0"}, "gradient.inf": {"a": "2", "b": "0", "c": "4"}})[0]
    assert counts(snapshot, "gradient.nan", "gradient.inf", "weight.nan") == {"a": 3.0, "c": 4.0}
    assert np.isnan(counts(snapshots(None, {"gradient.nan": {"a": "nan"}})[0], "gradient.nan")["a"]), "a count that is NaN is not 0"

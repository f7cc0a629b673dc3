import dataclasses
import json

import numpy as np
import pytest

from tests.recorded import activations, changed, parameters, run, same, snapshot
from trainvet.integrations.tensorboard.layout import ABSENT32, META, Layout, meta, read_meta
from trainvet.statistics import Snapshot, Table, Track


def through(layout, held):
    """Packed, and unpacked by a layout that came out of JSON."""
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    start, _ = read_meta(meta(held, layout.generation, 0, 0))
    matrix = layout.pack_tables(held) if held.tables else None
    return again.unpack(start, matrix, layout.pack_series(held) if held.series else None)


def test_a_run_comes_back_to_the_last_bit():
    layout = Layout()
    for item in run(60, every=7):
        held = dataclasses.replace(item, urgent=item.step == 14)
        layout.fit(held)
        assert same(through(layout, held), held)
    assert layout.generation == 1, "the same subjects and statistics need no new schema"


def test_a_measured_nan_is_not_an_absent_number():
    layout = Layout()
    bad = changed(next(run(1)), "gradient.norm", parameters(6)[0], float("nan"))
    bad = changed(bad, "activation.dead_share", activations(6)[1], float("inf"))
    layout.fit(bad)
    back = through(layout, bad)
    assert same(back, bad)
    assert np.isnan(back.tables["gradient"].columns["norm"][0])
    matrix = layout.pack_tables(bad).view(np.uint32)
    assert (matrix == ABSENT32).sum() > 0
    row, column = layout.subjects["parameter", parameters(6)[0]], layout.statistics["parameter"]["gradient.norm"]
    assert matrix[row, column] == 0x7FC00000


def test_a_nan_that_looks_like_absent_is_still_a_measured_nan():
    lookalike = np.array([ABSENT32], dtype=np.uint32).view(np.float32).astype(np.float64)
    absent = np.array([0x7FF800000000AB5E], dtype=np.uint64).view(np.float64)
    steps = np.array([0])
    held = Snapshot(0, 1, tables={"loss": Table(("l",), {"value": lookalike})}, series={"loss.value": {"l": Track(steps, steps, absent)}})
    layout = Layout()
    layout.fit(held)
    back = through(layout, held)
    assert np.isnan(back.tables["loss"].columns["value"][0])
    assert np.isnan(back.series["loss.value"]["l"].values[0])


def test_missing_subjects_columns_and_targets_stay_missing():
    whole = snapshot(0, np.random.default_rng(0))
    layout = Layout()
    layout.fit(whole)
    names = parameters(6)
    part = Snapshot(1, 1, tables={"gradient": Table((names[1], names[4]), {"norm": np.array([1.0, 2.0])})})
    assert not layout.fit(part)
    back = through(layout, part)
    assert same(back, part)
    assert back.column("weight.rms") is None


def test_another_order_of_subjects_is_kept():
    rng = np.random.default_rng(0)
    layout = Layout()
    layout.fit(snapshot(0, rng))
    turned = Snapshot(1, 1, tables={"gradient": Table(tuple(reversed(parameters(6))), {"norm": np.arange(6.0)})})
    assert layout.fit(turned)
    assert same(through(layout, turned), turned)
    assert layout.generation == 2


def test_new_subjects_and_statistics_make_a_new_generation():
    layout = Layout()
    first = snapshot(0, np.random.default_rng(0), count=4)
    more = snapshot(1, np.random.default_rng(0), count=8)
    assert layout.fit(first)
    assert layout.fit(more)
    assert not layout.fit(first)
    assert (layout.generation, len(layout.subjects)) == (2, 12)
    assert layout.width == 17
    assert same(through(layout, first), through(layout, first))


def track(steps, applied, values):
    return Track(np.array(steps), np.array(applied), np.array(values, dtype=float))


@pytest.mark.parametrize(
    "series",
    [
        {"loss.value": {"loss": track([3, 4, 5], [3, 3, 4], [1, 2, 3])}, "run.gradient_norm": {"run": track([5], [4], [7])}},
        {"loss.value": {"a": track([3, 5], [3, 5], [1, 2]), "b": track([4, 6], [4, 6], [3, 4])}},
        {"loss.value": {"a": track([3], [3], [1]), "b": track([3], [2], [np.nan])}},
        {"loss.value": {"a": track([3, 3], [3, 3], [1, 2])}},
    ],
    ids=["sampled norm", "two optimizers", "applied differs", "same step twice"],
)
def test_series_of_different_steps_come_back(series):
    layout = Layout()
    held = Snapshot(6, 6, series=series)
    layout.fit(held)
    assert same(through(layout, held), held)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": 2}, "format version 2"),
        ({"subjects": [["parameter", "a"], ["parameter", "a"]], "tables": {}}, "contradicts"),
        ({"tables": {"gradient": [99]}}, "not a schema"),
        ({"tables": {"activation": [0]}}, "contradicts"),
        ({"statistics": None}, "not a schema"),
        ({"statistics": {"parameter": [f"gradient.{index}" for index in range(20_000)], "activation": []}}, "over the limit"),
    ],
)
def test_a_schema_that_is_none_is_refused(change, says):
    layout = Layout()
    layout.fit(snapshot(0, np.random.default_rng(0), count=2))
    with pytest.raises(ValueError, match=says):
        Layout.from_dict({**layout.to_dict(), **change})


def test_arrays_that_do_not_fit_are_refused():
    layout = Layout()
    layout.fit(snapshot(0, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="do not fit the schema"):
        layout.unpack(Snapshot(0, 0), np.zeros((2, 2), np.float32), None)
    with pytest.raises(ValueError, match="do not fit the schema"):
        layout.unpack(Snapshot(0, 0), None, np.zeros((2, 2)))
    with pytest.raises(ValueError, match="numbers were expected"):
        read_meta(np.zeros(len(META) + 1))
    with pytest.raises(ValueError, match="whole number"):
        read_meta(np.full(len(META), np.nan))

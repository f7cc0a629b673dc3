import dataclasses
import json
import zlib
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.recorded import LoudGradient, changed, parameters, plan, run, same, selection, snapshot
from trainvet.monitor import Monitor
from trainvet.recording import (
    Recording,
    curve_points,
    facts_from_dict,
    facts_to_dict,
    jsonable,
    printable,
    replay,
    round_tables,
    single,
)
from trainvet.statistics import Facts, Layer, Loss, Optimizer, Schedule, Severance, Snapshot, Subject, Table


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float64, st.integers(0, 20), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_single_keeps_what_a_rule_asks_of_a_number(values):
    out = single(values)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(values))
    np.testing.assert_array_equal(out == 0, values == 0)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(values))
    np.testing.assert_array_equal(np.sign(out[values == values]), np.sign(values[values == values]))
    np.testing.assert_array_equal(out.view(np.uint32)[np.isnan(values)], 0x7FC00000)
    plain = np.isfinite(values) & (np.abs(values) < 3e38) & (np.abs(values) > 1e-30)
    np.testing.assert_array_equal(out[plain], values[plain].astype(np.float32))
    np.testing.assert_array_equal(single(out.astype(np.float64)), out)


def test_rounding_changes_tables_only_and_once():
    held = snapshot(4, np.random.default_rng(0), rows=3)
    once = round_tables(held)
    assert not same(held, once)
    assert same(once, round_tables(once))
    assert once.series is held.series
    vector = once.tables["gradient"].columns["norm"]
    assert vector.dtype == np.float64
    np.testing.assert_array_equal(vector, held.tables["gradient"].columns["norm"].astype(np.float32))
    empty = Snapshot(0, 1, tables={"gradient": Table((), {})})
    assert round_tables(empty).tables["gradient"].names == ()


def everything():
    odd = Schedule("g", "one-cycle", "epoch", np.array([0.0, 1e-3, 1e-3, 1e-3, float("nan"), 5.0]), horizon=None, restarts=True)
    return plan(
        4,
        losses=(Loss("loss", "cross_entropy", 10, 32, "sum", True),),
        layers=(Layer("a", "Linear", "linear", width_in=3, after=("b", "c")),),
        severed=(Severance("detach", "a", "net.py:3", ("a.weight",)),),
        schedules=(*plan().schedules, odd, Schedule("h", "none", "step", np.empty(0))),
        unobservable={"activation": "no activations"},
        hyper_parameters={"lr": 1e-3, "nested": {"a": [1, "x", None, True]}},
        clipping=float("inf"),
        planned_steps=None,
        resumed=True,
    )


def test_facts_come_back_as_they_were_through_json():
    facts = everything()
    plain = json.loads(json.dumps(facts_to_dict(facts), allow_nan=False))
    back = facts_from_dict(plain)
    for left, right in zip(facts.schedules, back.schedules, strict=True):
        np.testing.assert_array_equal(left.curve, right.curve)
        assert dataclasses.replace(left, curve=None) == dataclasses.replace(right, curve=None)
    assert dataclasses.replace(facts, schedules=()) == dataclasses.replace(back, schedules=())
    assert facts_from_dict({}) == Facts()


def test_a_secret_among_the_hyper_parameters_is_struck_out():
    text = json.dumps(facts_to_dict(plan(hyper_parameters={"lr": 0.1, "api_key": "hunter2", "logger": {"token": "hunter2"}})))
    assert "hunter2" not in text
    assert facts_from_dict(json.loads(text)).hyper_parameters["lr"] == 0.1


def test_every_field_of_the_facts_comes_back():
    other = {"int": 7, "int | None": 9, "float": 0.5, "str": "x", "Mapping[str, str]": {"a": "b"}, "Mapping[str, Any]": {"a": 1}}
    other |= {"float | None": 0.25, "bool | None": True, "Mapping[str, float]": {"val_acc": 0.5}}
    for kind in (Facts, Layer, Loss, Optimizer, Severance, Subject):
        required = {Facts: (), Subject: ("name", "kind"), Severance: ("operation",)}.get(kind, ("name",))
        given = dict.fromkeys(required, "n")
        given |= {field.name: other[field.type] for field in dataclasses.fields(kind) if field.type in other}
        given |= {field.name: not field.default for field in dataclasses.fields(kind) if field.type == "bool"}
        given |= {field.name: ("a",) for field in dataclasses.fields(kind) if field.type == "tuple[str, ...]"}
        facts = kind(**given)
        back = facts_from_dict(json.loads(json.dumps(facts_to_dict(facts))), kind)
        assert back == facts
        same_as_default = [field.name for field in dataclasses.fields(kind) if getattr(facts, field.name) == field.default]
        assert set(same_as_default) <= {"shape", "betas", "subjects", "optimizers", "schedules", "losses", "layers", "severed"}, (
            "a field of a type this test does not know"
        )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "expected an object"),
        ({"framework": 3}, "framework must be of type str"),
        ({"accumulation": True}, "accumulation must be of type int"),
        ({"subjects": [{"name": "a"}]}, "kind is missing"),
        ({"subjects": [{"name": "a", "kind": "parameter", "shape": [1, "x"]}]}, "shape must be of type int"),
        ({"subjects": {"name": "a"}}, "subjects must be of type list"),
        ({"unobservable": {"activation": 1}}, "unobservable must be an object"),
        ({"schedules": [{"group": "g", "type": "t", "interval": "step", "curve": {"length": 10**12, "points": 2, "zlib": ""}}]}, "2 points for"),
        ({"schedules": [{"group": "g", "type": "t", "interval": "step", "curve": {"length": 4, "points": 2, "zlib": "!!"}}]}, "cannot be read"),
        ({"schedules": [{"group": "g", "type": "t", "interval": "step", "curve": [1.0]}]}, "length must be"),
    ],
)
def test_facts_of_a_wrong_shape_are_refused_with_a_sentence(data, says):
    with pytest.raises(ValueError, match=says):
        facts_from_dict(data)


def test_a_curve_that_unpacks_to_more_than_it_says_is_refused():
    bomb = b64encode(zlib.compress(bytes(50_000_000))).decode()
    with pytest.raises(ValueError, match="shorter or longer"):
        facts_from_dict({"schedules": [{"group": "g", "type": "t", "interval": "s", "curve": {"length": 4, "points": 2, "zlib": bomb}}]})


def test_curve_points_keep_constant_stretches_exactly_and_spikes_of_long_curves():
    steps = np.repeat([1.0, 0.1, 0.01], 40_000)
    places, values = curve_points(steps)
    assert len(places) == 6
    np.testing.assert_array_equal(np.interp(np.arange(len(steps)), places, values), steps)
    wave = np.cos(np.linspace(0, 3, 10_000))
    wave[7_777] = 9.0
    places, values = curve_points(wave, 200)
    assert len(places) <= 200
    assert (places[0], places[-1], values.max()) == (0, 9_999, 9.0)
    assert np.abs(np.delete(np.interp(np.arange(10_000), places, values) - wave, np.arange(7_600, 7_900))).max() < 1e-3


def test_jsonable_is_strict_json_whatever_comes():
    class Broken:
        def __str__(self):
            raise RuntimeError

    loop: dict = {}
    loop["self"] = loop
    value = {
        1: np.float32("nan"),
        "b": [np.int64(3), np.bool_(True), (float("inf"),)],
        "c": Broken(),
        "d": loop,
        "e": b"x",
        "f": np.zeros(2),
        "g": {2},
    }
    text = json.dumps(jsonable(value), allow_nan=False)
    back = json.loads(text)
    assert back["1"] == "nan"
    assert back["b"] == [3, True, ["inf"]]
    assert back["c"] == "<Broken>"


def test_printable_shows_control_characters_and_does_not_obey_them():
    assert printable("plain ü 层") == "plain ü 层"
    assert printable("a\x1b[31mb\nc\u202ed\ud800") == "a�[31mb c�d�"
    assert len(printable("x" * 9000)) == 2000


def test_replay_judges_as_the_run_was_judged():
    snapshots = [changed(item, "gradient.norm", parameters(6)[2], 30.0) if item.step == 20 else item for item in run(40)]
    recording = Recording(moments=((0, plan()), *snapshots))
    report = replay(recording, Monitor(selection(LoudGradient())))
    assert [(item.code, item.step, item.subjects) for item in report.findings] == [("ZZ901", 20, (parameters(6)[2],))]
    assert report.status == "running"
    assert replay(recording, Monitor(selection(LoudGradient(limit=31.0)))).findings == ()
    assert recording.facts.planned_steps == 100
    assert len(recording.snapshots) == len(snapshots)

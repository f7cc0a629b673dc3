from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.outgrown_weight import OutgrownWeight
from trainvet.statistics import Layer, Loss

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abcd"} | {"d.bias": (8,)}
PLAN = plan(SHAPES)
W, INFO = Severity.WARNING, Severity.INFO


def sizes(grow="0.1, 2.01..2.1 x9", others="0.1 x10", who="b", start=1.0, top=1.0):
    written = {f"{layer}.weight": grow if layer == who else others for layer in "abcd"}
    return {"weight.rms": written, "weight.abs_max": {name: [top] * 10 for name in written}}


def told(columns, facts=PLAN):
    return [(item.step, item.severity, item.subjects) for item in findings(OutgrownWeight(), None, columns, facts)]


@pytest.mark.parametrize(("end", "fires"), [("1.8..1.99 x9", 0), ("2.01..2.1 x9", 1)])
def test_twenty_times_the_start_on_five_growing_samples(end, fires):
    assert told(sizes(f"0.1, {end}")) == [(5, W, ("b.weight",))] * fires


def test_it_must_grow_on():
    assert told(sizes("0.1, 3 x9")) == []
    assert told(sizes("0.1, 3, 3.1, 3.2, 3.3, 3.3, 3.2, 3.1, 3, 3")) == []


def test_the_others_must_not():
    assert told(sizes(others="0.1, 0.49 x9")) == [(5, W, ("b.weight",))]
    assert told(sizes(others="0.1, 0.51 x9")) == []
    two = plan({"a.weight": (8, 8), "b.weight": (8, 8)})
    assert told({key: {name: table[name] for name in two.parameters} for key, table in sizes().items()}, two) == []


def test_a_tiny_start_does_not_count():
    assert told(sizes("9e-4, 1..2 x9")) == []


@pytest.mark.parametrize(
    "facts",
    [
        plan(SHAPES, {"role": {"b.weight": "embedding"}}),
        dataclasses.replace(PLAN, layers=(Layer("norm", "LayerNorm", "norm", after=("b",)),)),
        dataclasses.replace(PLAN, losses=(Loss("loss", output_layer="b"),)),
        plan({**SHAPES, "norm.weight": (8,)}, {"role": {"norm.weight": "norm"}}),
    ],
)
def test_where_the_scale_matters_less_it_is_information(facts):
    assert told(sizes(), facts) == [(5, INFO, ("b.weight",))]


def test_without_a_known_output_layer_the_last_one_is_taken_for_it():
    assert told(sizes(who="d")) == [(5, INFO, ("d.weight",))]


def test_near_the_limit_of_float16():
    half = plan(SHAPES, {"dtype": dict.fromkeys(SHAPES, "float16")})
    flat = "0.1 x10"
    assert [item[:2] for item in told(sizes(flat, top=33000), half)] == [(4, W)]
    assert told(sizes(flat, top=32000), half) == []
    assert told(sizes(flat, top=33000)) == []


def test_told_once_and_nan_gives_no_verdict():
    assert len(told(sizes("0.1, 2.01..9 x9"))) == 1
    assert told(sizes([float("nan")] * 10)) == []
    rule = OutgrownWeight()
    drive(rule, snapshots(None, sizes("0.1 x10")), PLAN)
    assert rule.missing() == ""
    assert OutgrownWeight().missing() == "0 of 6 samples"


def test_a_matrix_that_starts_at_zero_is_compared_with_what_its_first_updates_make_of_it():
    up = np.concatenate([0.005 * np.arange(1, 31), np.full(10, 0.15)])
    ratio = np.concatenate([[np.inf], 1 / np.arange(1, 30), np.zeros(10)])
    table = {
        "weight.rms": {"up": up, **{name: np.full(40, 0.1) for name in ("a", "b", "c")}},
        "weight.abs_max": {"up": up, **{name: np.full(40, 0.1) for name in ("a", "b", "c")}},
    }
    facts = plan(dict.fromkeys(("up", "a", "b", "c", "head"), (8, 8)))
    assert [item.subjects for item in findings(OutgrownWeight(), None, table, facts)] == [("up",)]  # without the ratios the first sample counts
    table["update.ratio"] = {"up": ratio, **{name: np.zeros(40) for name in ("a", "b", "c")}}
    assert findings(OutgrownWeight(), None, table, facts) == []

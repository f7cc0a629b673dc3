from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.dead_relu import DeadRelu
from trainvet.statistics import Facts, Subject

SITE = Subject("act", "activation", "act", "ReLU", depth=3, shape=(32, 64), function="relu")
FIRST = dataclasses.replace(SITE, name="first", depth=1)
PLAN = Facts(framework="none", subjects=(SITE, FIRST))


def window(dead, batch=32, places=1, closes=(5, 1000), top=None):
    """The columns a probe hands over for a layer whose dead share in each sample's window is ``dead``: the window restarts when it is wide enough."""
    batches, positions, rows = 0, 0, ([], [])
    for _ in dead:
        if batches >= closes[0] and positions >= closes[1]:
            batches = positions = 0
        batches, positions = batches + 1, positions + batch * places
        rows[0].append(batches)
        rows[1].append(positions)
    return {"dead_share": dead, "batches": rows[0], "positions": rows[1], "max": top or [1.0] * len(dead)}


def columns(**layers):
    keys = next(iter(layers.values()))
    return {f"activation.{key}": {name: layer[key] for name, layer in layers.items()} for key in keys}


def fires(layer, facts=PLAN):
    return run(DeadRelu(), None, columns(act=layer), facts)


# windows of 5 batches of 200 close at samples 4, 9, 14, ...


@pytest.mark.parametrize(("dead", "told"), [(0.89, []), (0.91, [(4, "AC101")]), (1.0, [(4, "AC101")])])
def test_more_than_ninety_percent_from_the_start(dead, told):
    assert fires(window([dead] * 10, batch=200)) == told


def test_the_sample_before_is_quiet():
    assert fires(window([1.0] * 4, batch=200)) == []


def test_a_small_run_is_judged_after_ten_samples():
    """Batches of 32: 160 positions after 5 samples, 320 after 10."""
    assert fires(window([1.0] * 20)) == [(9, "AC101")]
    assert fires(window([1.0] * 9)) == []


def test_few_positions_of_one_long_batch_are_not_enough():
    assert fires(window([1.0] * 4, batch=5000)) == []


@pytest.mark.parametrize(("later", "told"), [(0.49, 0), (0.51, 1)])
def test_more_than_half_dead_and_grown(later, told):
    found = findings(DeadRelu(), None, columns(act=window([0.1] * 5 + [later] * 10, batch=200)), PLAN)
    assert [(item.step, item.severity) for item in found] == [(9, Severity.WARNING)] * told


@pytest.mark.parametrize(("first", "told"), [(0.39, 1), (0.41, 0)])
def test_growth_is_measured_against_the_first_window(first, told):
    assert len(fires(window([first] * 5 + [0.6] * 10, batch=200))) == told


def test_a_layer_that_always_was_sparse_is_healthy():
    """Some feed-forward layers of large language models have more than 70 % units that stay silent."""
    assert fires(window([0.75] * 50, batch=200)) == []


def test_the_growth_clause_needs_a_closed_window():
    assert fires(window([0.1] * 32 + [0.6] * 31)) == []
    assert fires(window([0.1] * 32 + [0.6] * 32)) == [(63, "AC101")]


def test_a_warning_may_grow_into_one_error():
    found = findings(DeadRelu(), None, columns(act=window([0.1] * 5 + [0.6] * 10 + [0.95] * 10, batch=200)), PLAN)
    assert [(item.step, item.severity) for item in found] == [(9, Severity.WARNING), (19, Severity.ERROR)]


def test_told_again_only_after_it_came_back_below_forty_percent():
    def told(between):
        return len(fires(window([0.95] * 5 + [between] * 5 + [0.95] * 5, batch=200)))

    assert (told(0.41), told(0.39)) == (1, 2)


def test_a_whole_layer_at_zero_for_five_samples_within_a_window():
    dead = [0.1] * 12 + [0.2] * 20
    dies = window(dead, top=[1.0] * 12 + [0.0] * 20)
    found = findings(DeadRelu(), None, columns(act=dies), PLAN)
    assert [(item.step, item.first_step, item.severity) for item in found] == [(16, 12, Severity.ERROR)]
    assert found[0].message == "100% of the units were never above 0 on 5 samples in a row (act)"
    assert fires(window(dead, top=[1.0] * 12 + [0.0] * 4 + [0.1] * 16)) == []


@pytest.mark.parametrize(
    ("shape", "told"), [((32, 1), []), ((32, 7), []), ((32, 8), [(4, "AC101")]), ((32, 2, 5), [(4, "AC101")]), ((), [(4, "AC101")])]
)
def test_a_layer_of_few_units_may_be_silent_for_some_batches(shape, told):
    facts = dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, shape=shape),))
    assert fires(window([0.0] * 9, batch=20, top=[0.0] * 9), facts) == told


def test_layers_are_told_together_upstream_first_since_their_window_began():
    found = findings(DeadRelu(), None, columns(act=window([1.0] * 9, batch=200), first=window([0.95] * 9, batch=200)), PLAN)
    assert [(item.subjects, item.first_step, item.step) for item in found] == [(("first", "act"), 0, 4)]


@pytest.mark.parametrize("change", [{"role": "gate"}, {"role": "expert"}, {"function": "gelu"}, {"function": ""}])
def test_exempt(change):
    dead = window([1.0] * 20, batch=200, top=[0.0] * 20)
    assert fires(dead, dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, **change),))) == []


@pytest.mark.parametrize("change", [{"role": "output"}, {"function": "relu6"}])
def test_not_exempt(change):
    facts = dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, **change),))
    assert fires(window([1.0] * 9, batch=200), facts) == [(4, "AC101")]


def test_nan_gives_no_verdict():
    nan = [float("nan")] * 20
    assert fires(window(nan, batch=200, top=nan)) == []


def test_the_fix_carries_the_runs_learning_rate_and_coverage_says_what_is_missing():
    rate = {"optimizer.learning_rate": "0.5 x10"}
    found = findings(DeadRelu(), rate, columns(act=window([0.1] * 5 + [1.0] * 5, batch=200)), PLAN)[0]
    assert found.fixes[0] == "set the learning rate to about 0.05 (now 0.5)"
    assert found.causes[0] == "a too large update pushed the biases below reach"
    assert "100%" in found.message
    start = findings(DeadRelu(), rate, columns(act=window([1.0] * 9, batch=200)), PLAN)[0]
    assert (start.causes[0], start.fixes[0]) == ("large negative biases", "start biases at 0 and normalise the inputs")
    rule = DeadRelu()
    drive(rule, snapshots(None, columns(act=window([1.0] * 5, batch=1, top=[0.0] * 5))), PLAN)
    assert rule.missing() == "", "it has judged"
    rule = DeadRelu()
    assert rule.missing() == "a window of 5 batches and 300 positions"
    rule.begin(dataclasses.replace(PLAN, subjects=(dataclasses.replace(SITE, function="gelu"),)))
    assert rule.missing() == "no ReLU layer was seen"

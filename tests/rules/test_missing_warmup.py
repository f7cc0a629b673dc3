from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.missing_warmup import MissingWarmup
from trainvet.statistics import Facts, Layer, Optimizer, Schedule

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abc"}
LAYERS = (Layer("attn", "MultiheadAttention", "attention"), Layer("fc", "Linear", "linear"))
PLAN = plan(SHAPES, layers=LAYERS)
W, INFO = Severity.WARNING, Severity.INFO
STUCK, LEARNS = "3 x260", "3..1 x260"


def columns(ratio=0.1, before=0.1):
    return {
        "update.ratio": dict.fromkeys(SHAPES, [ratio] * 10),
        "update.rms": dict.fromkeys(SHAPES, [ratio * before] * 10),
        "weight.rms": dict.fromkeys(SHAPES, [before] * 10),
    }


def told(loss=STUCK, rate="1e-3 x260", ratio=0.1, facts=PLAN, **how):
    found = findings(MissingWarmup(), {"loss.value": loss, "optimizer.learning_rate": rate}, columns(ratio, **how), facts)
    return [(item.step, item.severity) for item in found]


def test_a_warning_needs_large_first_updates_and_a_loss_that_stands():
    assert told() == [(199, W)]
    assert told(loss=LEARNS) == [(199, INFO)]
    assert told(ratio=0.051) == [(199, W)]
    assert told(ratio=0.049) == [(199, INFO)]
    assert told(before=0.9e-3) == [(199, INFO)], "weights that were tiny move far in health"


@pytest.mark.parametrize(("end", "severity"), [(2.97, W), (2.9, INFO), (5.0, W)])
def test_progress_is_two_per_cent(end, severity):
    assert told(loss=f"3 x100, {end} x160") == [(199, severity)]


QUIET = {
    "a warm-up": {"rate": "1e-6..1e-3 x100, 1e-3 x160"},
    "a warm-up that begins just below half": {"rate": "4.9e-4 x50, 1e-3 x210"},
    "the first step at 0": {"rate": "0, 1e-3 x259"},
    "a gentle rate": {"rate": "1e-5 x260"},
    "loaded weights": {"facts": dataclasses.replace(PLAN, pretrained=True)},
    "a resumed run": {"facts": dataclasses.replace(PLAN, resumed=True)},
    "no transformer": {"facts": plan(SHAPES, layers=LAYERS[1:])},
    "SGD": {"facts": plan(SHAPES, None, Optimizer("SGD", "SGD", "sgd", groups=("group 0",)), layers=LAYERS)},
    "a schedule that will rise": {"facts": dataclasses.replace(PLAN, schedules=(Schedule("group 0", "x", "step", np.array([1e-3, 3e-3])),))},
    "too short a run": {"loss": "3 x199"},
    "nothing is known": {"facts": Facts()},
}


@pytest.mark.parametrize("how", QUIET.values(), ids=QUIET)
def test_quiet(how):
    assert told(**how) == []


def test_just_above_half_is_no_warm_up():
    assert told(rate="5.1e-4 x50, 1e-3 x210") == [(199, W)]


@pytest.mark.parametrize("type_", ["LayerNorm", "LayerNormalization", "RMSNorm"])
def test_layer_normalisation_counts_as_well_and_may_be_known_from_parameters(type_):
    assert told(facts=plan(SHAPES, layers=(Layer("norm", type_, "norm"),))) == [(199, W)]
    assert told(facts=plan(SHAPES, {"module_type": {"b.weight": type_}})) == [(199, W)]


def test_skipped_steps_do_not_count():
    tracks = {"loss.value": STUCK, "optimizer.learning_rate": "1e-3 x260", "run.skipped": "1 x5, 0 x255"}
    assert [item.step for item in findings(MissingWarmup(), tracks, columns(), PLAN)] == [204]


def test_words():
    (found,) = findings(MissingWarmup(), {"loss.value": STUCK, "optimizer.learning_rate": "1e-3 x260"}, columns(), PLAN)
    assert found.message.startswith("a model with attention starts at its full learning rate of 0.001 under Adam; the first updates moved")
    assert found.fixes[0] == "warm the learning rate up over 2000 steps, 2/(1-beta2)"
    short = dataclasses.replace(PLAN, planned_steps=400)
    (found,) = findings(MissingWarmup(), {"loss.value": STUCK, "optimizer.learning_rate": "1e-3 x260"}, columns(), short)
    assert found.fixes[0] == "warm the learning rate up over the first 20 steps (a twentieth of the run)"


def test_nan_gives_no_warning_and_coverage_says_what_is_missing():
    assert [item[1] for item in told(ratio=float("nan"))] == [INFO]
    rule = MissingWarmup()
    assert rule.missing() == "the layers or the optimizer are not known"
    rule.begin(plan(SHAPES, layers=LAYERS[1:]))
    assert rule.missing() == "no attention or layer normalisation under Adam was seen"
    drive(rule, snapshots({"loss.value": "3 x50"}), PLAN)
    assert rule.missing() == "the loss of 200 applied steps"

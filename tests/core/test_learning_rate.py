from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from tests.series import plan, snapshots
from trainvet.learning_rate import LearningRate
from trainvet.matrices import Matrices, median
from trainvet.statistics import Optimizer, Schedule

PLAN = plan({"a.weight": (4, 4), "b.weight": (4, 4)}, {"group": {"b.weight": "head"}})
NAMES = ("a.weight", "b.weight")


def followed(tracks, facts=PLAN, at=(), **how):
    """The rates after a run; sampled at the steps ``at``."""
    rate = LearningRate()
    rate.begin(facts)
    columns = {"gradient.norm": {"a.weight": [1.0] * len(at)}} if at else None
    for snapshot in snapshots({"optimizer.learning_rate": tracks}, columns, at or None, **how):
        rate.follow(snapshot)
    return rate


def test_each_parameter_has_its_groups_rate():
    rate = followed({"group 0": "0.1 x3, 0.2", "head": "1 x4"})
    assert rate.of(NAMES).tolist() == [0.2, 1.0]
    assert np.isnan(rate.of(("unknown",))).all()


def test_a_single_group_is_everybodys():
    assert followed({"whatever it is called": "0.1 x3"}).of(NAMES).tolist() == [0.1, 0.1]


def test_a_rate_that_is_not_finite_is_passed_over():
    assert followed({"group 0": "0.1, nan"}).of(NAMES[:1]).tolist() == [0.1]


@pytest.mark.parametrize(
    ("written", "settled"), [("1 x21", True), ("1 x5, 0.5 x16", True), ("1 x5, 0.49 x16", False), ("0 x21", False), ("0..1 x21", False)]
)
def test_settled(written, settled):
    assert followed({"group 0": written}, at=(0, 10, 20)).settled(NAMES[:1], 0.5).tolist() == [settled]


def test_rising_is_seen_between_samples_whatever_the_blocks():
    for block in (1, 3, 50):
        assert not followed({"group 0": "1 x12, 2 x9"}, at=(0, 10, 20), block=block).settled(NAMES[:1], 0.5).any()
        assert followed({"group 0": "1 x9, 2 x12"}, at=(0, 10, 20), block=block).settled(NAMES[:1], 0.5).all()


def test_the_planned_peak_counts():
    planned = dataclasses.replace(PLAN, schedules=(Schedule("group 0", "OneCycleLR", "step", np.array([0.1, 1.0, 0.1])),))
    assert not followed({"group 0": "0.1 x21"}, planned, at=(0, 10, 20)).settled(NAMES[:1], 0.5).any()


def test_an_unknown_rate_is_not_settled():
    assert not followed({"head": "1 x5", "other": "1 x5"}).settled(NAMES[:1], 0.5).any()


def test_advice_carries_the_largest_rate():
    rate = followed({"group 0": "0.1 x3", "head": "0.5 x3"})
    assert rate.advice(0.1) == "set the learning rate to about 0.05 (now 0.5)"
    assert rate.advice(0.1, NAMES[:1]) == "set the learning rate to about 0.01 (now 0.1)"
    assert LearningRate().advice(0.1) == "lower the learning rate"
    assert LearningRate().advice(10) == "raise the learning rate"
    assert rate.advice(float("inf")) == "raise the learning rate"


def test_the_warm_up_to_suggest():
    rate = LearningRate()
    rate.begin(PLAN)
    assert rate.warm_up() == "warm the learning rate up over 2000 steps, 2/(1-beta2)"
    rate.begin(dataclasses.replace(PLAN, optimizers=(Optimizer("o", "SGD", "sgd"),)))
    assert rate.warm_up() == "warm the learning rate up over the first steps"


def test_state_is_json():
    rate, other = followed({"group 0": "1 x5, 0.4 x16"}, at=(0, 10, 20)), LearningRate()
    other.begin(PLAN)
    other.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    assert other.of(NAMES[:1]).tolist() == [0.4]
    assert not other.settled(NAMES[:1], 0.5).any()


# ---- matrices


def table(ratio, moved, weight=0.0):
    return snapshots(None, {"update.ratio": {"a.weight": [ratio]}, "update.rms": {"a.weight": [moved]}, "weight.rms": {"a.weight": [weight]}})[0]


@pytest.mark.parametrize(
    ("ratio", "moved", "weight", "expected"),
    [
        (0.1, 0.01, 5.0, (0.1, 0.1)),
        (0.0, 0.0, 5.0, (0.0, 5.0)),
        (float("inf"), 0.01, 0.01, (0.0, 0.0)),
        (float("nan"), float("nan"), 0.01, (0.0, 0.0)),
    ],
)
def test_the_weight_before_the_update(ratio, moved, weight, expected):
    matrices = Matrices()
    matrices.begin(PLAN)
    names, ratios, before = matrices.ratios(table(ratio, moved, weight))
    assert names == ("a.weight",)
    np.testing.assert_allclose((ratios[0], before[0]), expected)


def test_only_trainable_owned_matrices():
    shapes = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "c.weight": (4, 4)}
    facts = plan(shapes, {"trainable": {"b.weight": False}}, Optimizer("o", parameters=("a.weight", "a.bias", "b.weight")))
    matrices = Matrices()
    matrices.begin(facts)
    ones = {key: dict.fromkeys(shapes, "0.1") for key in ("update.ratio", "update.rms", "weight.rms")}
    assert matrices.ratios(snapshots(None, ones)[0])[0] == ("a.weight",)
    assert (matrices.trainable, matrices.frozen) == (1, 1)
    assert matrices.ratios(snapshots({"loss.value": "1"})[0])[0] == ()


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11])
def test_the_median_is_numpys(count):
    values = np.random.default_rng(count).normal(size=count)
    assert median(values) == np.median(values)

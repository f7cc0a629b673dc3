from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.noise import KINDS, falling, noise
from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.no_better_than_prior import NoBetterThanPrior
from trainvet.statistics import Facts, Loss

LN10 = math.log(10)
PLAN = Facts("torch", planned_steps=1000, batches_per_epoch=100, losses=(Loss("loss", "cross_entropy", 10, 64),))


def columns(entropy=LN10, seen=2000.0, count=10):
    return {"label.entropy": {"label": [entropy] * count}, "label.seen": {"label": [seen] * count}}


def told(written, facts=PLAN, rate=0.1, **labels):
    tracks = {"loss.value": written, "optimizer.learning_rate": rate if isinstance(rate, str) else [rate] * 1000}
    found = findings(NoBetterThanPrior(), tracks, columns(**labels), facts)
    return [(item.step, item.severity) for item in found]


def plan(**changes):
    loss = {key: changes.pop(key) for key in list(changes) if key in {field.name for field in dataclasses.fields(Loss)}}
    return dataclasses.replace(PLAN, losses=(dataclasses.replace(PLAN.losses[0], **loss),), **changes)


WARNED = [(299, Severity.WARNING)]


@pytest.mark.parametrize(
    ("written", "facts", "labels", "step"),
    [
        ("2.3 x1000", PLAN, {}, 299),  # 200 steps, twice in a row
        ("5..2.3 x50, 2.26 x950", PLAN, {}, 399),  # 0.98 ln 10 = 2.2565
        ("0.4 x1000", PLAN, {"entropy": 0.4}, 299),
        ("2.3 x1000", PLAN, {"seen": 1000.0}, 299),
        ("2.3 x1000", plan(batches_per_epoch=400), {}, 499),  # an epoch of 400 steps
        ("2.3 x1000", plan(planned_steps=None), {}, 599),
        ("2.3 x1000", plan(planned_steps=8000), {}, 899),
        ("2.3 x1000", plan(weighted=True), {}, 299),
        ("0.7 x1000", plan(kind="binary_cross_entropy", classes=2), {"entropy": 0.69}, 299),
    ],
)
def test_fires(written, facts, labels, step):
    assert told(written, facts, **labels) == [(step, Severity.WARNING)]


@pytest.mark.parametrize(
    ("written", "facts", "labels"),
    [
        ("2.25 x1000", PLAN, {}),
        ("2.6..2.28 x1000", PLAN, {}),  # still falling
        ("2.3 x299", PLAN, {}),
        ("2.3 x1000", PLAN, {"seen": 999.0}),
        ("2.3 x1000", plan(classes=101), {}),  # 20 labels per class
        ("2.3 x1000", plan(smoothed=True), {}),
        ("2.3 x1000", plan(kind="unknown"), {}),
        ("2.3 x1000", plan(kind="regression"), {}),
        ("2.3 x1000", plan(reduction="sum"), {}),
        ("6 x1000", plan(weighted=True), {}),
        ("2.3 x1000", Facts(), {}),
        ("2.3 x1000", PLAN, {"entropy": 0.0}),  # a single class
        ("2.3 x1000", PLAN, {"entropy": float("nan")}),
        ("2.3 x1000", PLAN, {"count": 0}),
    ],
)
def test_quiet(written, facts, labels):
    assert told(written, facts, **labels) == []


def test_quiet_while_the_rate_is_below_half_of_its_peak():
    assert told("2.3 x1000", rate="0.1 x150, 0.04 x850") == []
    assert told("2.3 x1000", rate="0.1 x150, 0.06 x850") == WARNED


@pytest.mark.parametrize("kind", KINDS)
def test_noise_around_the_prior_and_below_it(kind):
    for seed in range(4):
        flat = LN10 + 0.01 + 0.02 * noise(kind, 1000, seed)
        assert len(drive(NoBetterThanPrior(), snapshots({"loss.value": flat}, columns()), PLAN)) == 1
        assert drive(NoBetterThanPrior(), snapshots({"loss.value": falling(kind, 1000, seed)}, columns()), PLAN) == []


def test_the_message_and_the_advice():
    (found,) = findings(NoBetterThanPrior(), {"loss.value": "2.3 x400", "optimizer.learning_rate": np.full(400, 0.1)}, columns(), PLAN)
    assert found.message == "after 300 steps the loss is 2.3; knowing only how frequent each class is gives 2.303"
    assert (found.first_step, found.where) == (100, "loss")
    assert found.fixes[-1] == "try learning rates between 0.01 and 1 (now 0.1)"


def test_missing_evidence_is_said():
    rule = NoBetterThanPrior()
    assert "of 500 applied steps" in rule.missing()
    drive(rule, snapshots({"loss.value": "2.3 x150"}, columns(seen=500.0)), PLAN)
    assert rule.missing() == "150 of 200 applied steps, 500 of 1000 labels (20 per class)"
    drive(rule, snapshots({"loss.value": "2.3 x400"}), Facts(losses=(Loss("loss", "regression"),)))
    assert rule.missing() == "no plain cross-entropy over classes is known"
    rule = NoBetterThanPrior()
    drive(rule, snapshots({"loss.value": "2.3 x400"}), PLAN)
    assert rule.missing() == "no class labels were seen"
    drive(rule, snapshots({"loss.value": "2.3 x400"}, columns()), PLAN)
    assert rule.missing() == ""

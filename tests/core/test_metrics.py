from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.series import snapshots
from trainvet.metrics import LAST, Course, Metrics, direction, held_out, quantity


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("val_loss", -1),
        ("loss", -1),
        ("val/accuracy", 1),
        ("val_acc", 1),
        ("train_AUC", 1),
        ("perplexity", -1),
        ("validation.f1", 1),
        ("lr", 0),
        ("lossless", 0),
        ("acc_loss", 0),
        ("", 0),
    ],
)
def test_which_way_is_better(name, sign):
    assert direction(name) == sign


@pytest.mark.parametrize(
    ("name", "is_held_out"), [("val_loss", True), ("eval/acc", True), ("loss", False), ("train_loss", False), ("interval", False)]
)
def test_which_data(name, is_held_out):
    assert held_out(name) is is_held_out


def test_the_same_quantity_on_other_data():
    assert quantity("val_acc") == quantity("train/accuracy") == quantity("accuracy_epoch")
    assert quantity("val_loss") == quantity("loss") != quantity("val_acc")


def test_a_course_keeps_the_best_and_the_last():
    course = Course()
    for step, value in enumerate([3.0, 1.0, float("nan"), 2.0]):
        course.add(10 * step, value, -1)
    assert (course.count, course.first, course.best, course.best_step, course.age) == (4, 3.0, 1.0, 10, 2)
    for step in range(1000):
        course.add(step, 5.0, -1)
    assert len(course.values) == len(course.steps) == LAST


def test_the_noise_of_a_course():
    course = Course()
    for step, value in enumerate(np.linspace(5, 1, 60) + 0.1 * np.random.default_rng(0).normal(size=60)):
        course.add(step, float(value), -1)
    assert course.noise == pytest.approx(0.1, rel=0.35)
    few = Course()
    for step in range(4):
        few.add(step, step % 2, -1)
    assert few.noise == 0
    few.add(5, math.nan, -1)
    assert math.isnan(few.noise)


def test_metrics_whose_direction_is_unknown_are_left_out_and_the_state_goes_round():
    metrics = Metrics()
    (snapshot,) = snapshots({"metric.value": {"val_loss": [1.0], "lr": [0.1]}})
    assert list(metrics.add(snapshot)) == [["val_loss"]]
    other = Metrics()
    other.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert other.of == metrics.of

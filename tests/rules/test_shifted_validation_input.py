from __future__ import annotations

import numpy as np
import pytest

from tests.series import drive
from trainvet.rules.shifted_validation_input import ShiftedValidationInput
from trainvet.statistics import Facts, Snapshot, Subject, Table


def run(mean, std, count=600, batches=30, facts=None, evaluations=1):
    """30 training batches of 32 standard normal inputs, then evaluations with these numbers."""
    train = {"mean": np.zeros(1), "std": np.ones(1), "count": np.array([32.0])}
    held = [Snapshot(step, step + 1, tables={"input": Table(("input",), train)}) for step in range(batches)]
    seen = {"mean": np.array([mean]), "std": np.array([std]), "count": np.array([float(count)])}
    held += [Snapshot(batches - 1, batches, tables={"validation_input": Table(("input",), seen)}) for _ in range(evaluations)]
    rule = ShiftedValidationInput()
    return [item.code for item in drive(rule, held, facts)], rule


@pytest.mark.parametrize(
    ("mean", "std", "found"),
    [(0.49, 1, 0), (0.51, 1, 1), (-0.51, 1, 1), (0, 1.99, 0), (0, 2.01, 1), (0, 0.51, 0), (0, 0.49, 1), (0, 0, 1), (float("nan"), 1, 0)],
)
def test_half_a_deviation_or_a_factor_of_two(mean, std, found):
    assert run(mean, std)[0] == ["IN106"] * found


@pytest.mark.parametrize(
    ("mean", "std", "count", "found"), [(1.9, 1, 200, 0), (2.1, 1, 200, 1), (0, 15, 200, 0), (0, 17, 200, 1), (0, 255, 100, 1), (0, 255, 99, 0)]
)
def test_few_samples_allow_only_what_is_far_off(mean, std, count, found):
    assert run(mean, std, count)[0] == ["IN106"] * found


@pytest.mark.parametrize(("count", "found"), [(500, 1), (499, 0)])
def test_half_a_deviation_needs_five_hundred_samples(count, found):
    assert run(0.6, 1, count)[0] == ["IN106"] * found


def test_samples_of_the_same_data_are_quiet():
    random = np.random.default_rng(0)
    for _ in range(200):
        part = random.normal(size=(100, 1))
        assert run(part.mean(), part.std(), 100)[0] == []


def test_augmented_training_data_may_differ_more():
    assert run(0.9, 1, facts=Facts(augmented=True))[0] == []
    assert run(1.1, 1, facts=Facts(augmented=True))[0] == ["IN106"]


def test_integers_are_not_compared_and_each_input_is_told_once():
    assert run(5, 1, facts=Facts(subjects=(Subject("input", "input", dtype="int64"),)))[0] == []
    assert run(5, 1, evaluations=4)[0] == ["IN106"]


def test_parts_put_together_are_the_whole():
    random = np.random.default_rng(1)
    rule, whole = ShiftedValidationInput(), random.normal(3, 2, 640)
    for part in whole.reshape(20, 32):
        rule._add(("input",), np.array([part.mean()]), np.array([part.std()]), np.array([32.0]))
    assert rule._seen["mean"][0] == pytest.approx(whole.mean())
    assert (rule._seen["spread"][0] / 640) ** 0.5 == pytest.approx(whole.std())


def test_what_is_missing():
    assert ShiftedValidationInput().missing() == "a floating input seen 100 times in training and in an evaluation"

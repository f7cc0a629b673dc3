from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import plan, snapshots
from trainvet.statistics import MEANING, TARGETS, Facts, Optimizer, Snapshot, Subject, Table, kind_of

PLAN = plan({"late.weight": (8, 4), "early.weight": (4, 4), "unknown": (2,)}, {"depth": {"late.weight": 9, "early.weight": 1, "unknown": -1}})


def test_every_statistic_belongs_to_a_target_and_has_a_meaning():
    for key, meaning in MEANING.items():
        assert key.split(".", 1)[0] in TARGETS
        assert meaning


def test_what_was_not_measured_is_absent_and_nan_is_nan():
    snapshot = snapshots({"loss.value": "1"}, {"gradient.norm": {"a": "nan", "b": "2"}})[0]
    assert snapshot.column("gradient.rms") is None
    assert snapshot.column("weight.norm") is None
    names, vector = snapshot.column("gradient.norm")
    assert (names, np.isnan(vector).tolist()) == (("a", "b"), [True, False])
    assert snapshot.tracks("run.gradient_norm") == {}
    assert set(snapshot.keys()) == {"gradient.norm", "loss.value"}


def test_an_empty_series_is_no_key():
    assert set(Snapshot(0, 0, series={"loss.value": {}}).keys()) == set()


def test_values_for_names():
    snapshot = Snapshot(0, 1, tables={"gradient": Table(("a", "b"), {"rms": np.array([1.0, 2.0])})})
    assert snapshot.values("gradient.rms", ("b", "a")).tolist() == [2, 1]
    np.testing.assert_array_equal(snapshot.values("gradient.rms", ("a", "c")), [1, np.nan])
    np.testing.assert_array_equal(snapshot.values("gradient.norm", ("a",)), [np.nan])


def test_parameters_owned_and_upstream():
    assert set(PLAN.parameters) == {"late.weight", "early.weight", "unknown"}
    assert PLAN.upstream_first(["unknown", "late.weight", "early.weight", "never seen"]) == ("early.weight", "late.weight", "unknown", "never seen")
    two = dataclasses.replace(PLAN, optimizers=(Optimizer("a", parameters=("late.weight",)), Optimizer("b", parameters=("unknown",))))
    assert two.owned == {"late.weight", "unknown"}
    assert Facts().owned == frozenset()


def test_a_changed_copy_of_the_facts_does_not_keep_what_was_looked_up():
    assert "late.weight" in PLAN.parameters
    assert dataclasses.replace(PLAN, subjects=()).parameters == {}


def test_why_not():
    facts = Facts(unobservable={"activation": "compiled", "run.loss_scale": "no scaler"})
    assert facts.why_not(("gradient.norm", "activation.nan")) == "compiled"
    assert facts.why_not(("run.loss_scale",)) == "no scaler"
    assert facts.why_not(("run.skipped", "gradient.norm")) == ""


@pytest.mark.parametrize(
    ("shape", "trainable", "matrix", "numel"), [((4, 3), True, True, 12), ((4, 3), False, False, 12), ((5,), True, False, 5), ((), True, False, 1)]
)
def test_subjects(shape, trainable, matrix, numel):
    subject = Subject("a", "parameter", shape=shape, trainable=trainable)
    assert (subject.is_matrix, subject.numel) == (matrix, numel)


def test_kinds():
    assert [kind_of(target) for target in ("gradient", "weight", "update", "buffer")] == ["parameter", "parameter", "parameter", "buffer"]

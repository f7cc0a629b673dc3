from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.mismatched_output import MismatchedOutput
from trainvet.statistics import Facts, Loss

NAN = float("nan")


def facts(made, expects="values", kind="regression", axis=-1, framework="torch", **more):
    return Facts(
        framework, losses=(Loss("loss", kind, 10, 64, expects=expects, output_function=made, output_axis=axis, output_layer="head", **more),)
    )


OUTPUT = {"units": 1.0, "samples": 64.0, "simplex_share": 0.0, "log_simplex_share": 0.0, "column_error": 5.0, "max": 1.0, "constant": 0.0}
LABEL = {"min": -2.0, "max": 2.0, "mean": 0.0, "std": 1.0, "count": 64.0}


def columns(count=4, **values):
    both = {f"output.{key}": {"output": [values.get(key, value)] * count} for key, value in OUTPUT.items()}
    wanted = {key: values.get(f"label_{key}", value) for key, value in LABEL.items()}
    return both | {f"label.{key}": {"label": [value] * count} for key, value in wanted.items()}


def told(known, **values):
    found = findings(MismatchedOutput(), None, columns(**values), known)
    return [(item.step, item.first_step, item.severity) for item in found]


CLASSES = {"expects": "logits", "kind": "cross_entropy"}
BINARY = {"expects": "logits", "kind": "binary_cross_entropy"}
ERROR = [(2, 0, Severity.ERROR)]
FIRES = {
    "softmax over one unit": (facts("softmax", "probabilities", "binary_cross_entropy"), {}),
    "softmax over one unit, squared error": (facts("softmax"), {"label_min": 0.0, "label_max": 1.0, "label_mean": 0.5, "label_std": 0.5}),
    "cross-entropy over one class": (facts("linear", **CLASSES), {}),
    "softmax over the batch": (facts("softmax", "probabilities", "cross_entropy", 0), {"units": 10.0}),
    "columns that sum to 1": (facts("softmax", "probabilities", "cross_entropy"), {"units": 10.0, "column_error": 0.009}),
    "log-softmax over the batch": (facts("log_softmax", "log_probabilities", "cross_entropy", 0), {"units": 10.0}),
    "ReLU into binary logits": (facts("relu", **BINARY), {}),
    "standardised targets into a ReLU": (facts("relu"), {}),
    "standardised targets into tanh": (facts("tanh"), {}),
    "targets from 0 to 10 into a sigmoid": (facts("sigmoid"), {"label_min": 0.0, "label_max": 10.0, "label_mean": 5.0, "label_std": 3.0}),
    "just above the reach": (facts("tanh"), {"label_min": -0.9, "label_max": 1.51, "label_mean": 0.01, "label_std": 0.8}),
    "absolute error": (facts("relu", kind="unknown"), {}),
}
QUIET = {
    "sigmoid for one unit": (facts("sigmoid", "probabilities", "binary_cross_entropy"), {}),
    "softmax over classes": (facts("softmax", "probabilities", "cross_entropy", 1), {"units": 10.0, "simplex_share": 1.0}),
    "softmax over classes, as many as samples": (
        facts("softmax", "probabilities", "cross_entropy", 0),
        {"units": 10.0, "simplex_share": 1.0, "column_error": 0.0},
    ),
    "one sample": (facts("softmax", "probabilities", "cross_entropy", 0), {"units": 10.0, "samples": 1.0}),
    "softmax rounded in bfloat16": (facts("softmax", "probabilities", "cross_entropy", 1), {"units": 1000.0, "simplex_share": 0.2}),
    "columns not quite 1": (facts("softmax", "probabilities", "cross_entropy"), {"units": 10.0, "column_error": 0.011}),
    "auto-encoder with a sigmoid": (facts("sigmoid"), {"label_min": 0.0, "label_max": 1.0, "label_mean": 0.13, "label_std": 0.3}),
    "images in [-1, 1] into tanh": (facts("tanh"), {"label_min": -1.0, "label_max": 1.0, "label_mean": -0.3, "label_std": 0.6}),
    "positive targets into a ReLU": (facts("relu"), {"label_min": 0.0, "label_max": 9.0, "label_mean": 1.0, "label_std": 1.0}),
    "a few targets below 0": (facts("relu"), {"label_min": -0.5, "label_max": 9.0, "label_mean": 3.0, "label_std": 2.0}),
    "just within the reach": (facts("tanh"), {"label_min": -0.9, "label_max": 1.51, "label_mean": -0.01, "label_std": 0.8}),
    "hardly beyond": (facts("tanh"), {"label_min": -0.9, "label_max": 1.39, "label_mean": 0.01, "label_std": 0.8}),
    "least squares on a sigmoid": (facts("sigmoid"), {"label_min": 1.0, "label_max": 1.0, "label_mean": 1.0, "label_std": 0.0}),
    "linear": (facts("linear"), {}),
    "leaky ReLU": (facts("leaky_relu"), {}),
    "unknown": (facts(""), {}),
    "ReLU into logits over classes": (facts("relu", **CLASSES), {"units": 10.0}),
    "nan": (facts("relu"), {"label_min": NAN, "label_mean": NAN, "label_std": NAN, "label_max": NAN}),
    "two batches": (facts("relu"), {"count": 2}),
    "few labels": (facts("relu"), {"label_count": 7.0}),
}


@pytest.mark.parametrize(("known", "values"), FIRES.values(), ids=FIRES)
def test_fires(known, values):
    assert told(known, **values) == ERROR


@pytest.mark.parametrize(("known", "values"), QUIET.values(), ids=QUIET)
def test_quiet(known, values):
    assert told(known, **values) == []


def test_32_labels_and_three_batches():
    assert told(facts("relu"), label_count=8.0) == [(3, 0, Severity.ERROR)]
    assert told(facts("relu"), count=3) == ERROR


def test_a_dead_relu_at_the_end_needs_ten_samples():
    dead = {"constant": 1.0, "max": 0.0, "label_min": 0.5, "label_mean": 3.0}
    assert told(facts("relu"), count=10, **dead) == [(9, 0, Severity.ERROR)]
    assert told(facts("relu"), count=9, **dead) == []
    assert told(facts("relu"), count=10, **{**dead, "max": 0.1}) == []


def test_a_summed_loss_is_information_told_once():
    rule = MismatchedOutput()
    (found,) = rule.begin(facts("linear", reduction="sum"))
    assert (found.severity, found.step) == (Severity.INFO, 0)
    assert "(64)" in found.fixes[0]
    assert list(rule.begin(facts("linear", reduction="sum"))) == []


def test_the_message_names_the_range_and_the_remedy():
    (found,) = findings(MismatchedOutput(), None, columns(), facts("relu", framework="keras"))
    assert found.message == "targets reach from -2 to 2, a relu gives nothing below 0"
    assert found.fixes == ("give head no activation (activation=None)",)
    assert found.where == "head"


def test_a_loss_that_becomes_known_later_and_missing_evidence():
    rule = MismatchedOutput()
    run = snapshots(None, columns(8))
    assert drive(rule, run[:2]) == []
    assert rule.missing() == "the loss is not known"
    list(rule.begin(facts("relu")))
    assert rule.missing() == "0 of 3 sampled batches"
    assert [item.step for snapshot in run[2:] for item in rule.check(snapshot)] == [4]
    assert rule.missing() == ""


def attention(written, labels="32 x9"):
    return {"activation.batch_axis": {"attend.softmax": written, "other": "0 x9"}, "label.count": {"label": labels}}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (attention("1 x9"), [(2, 0, ("attend.softmax",))]),
        (attention("1, 1, 0, 1, 1, 0, 1, 1, 0"), []),
        (attention("1 x9", "1 x9"), []),  # one label: the "batch" is a set, such as the nodes of one graph
        (attention([NAN] * 9), []),
    ],
)
def test_a_softmax_inside_the_model_that_runs_over_the_batch(table, expected):
    found = findings(MismatchedOutput(), None, table)
    assert [(item.step, item.first_step, item.subjects) for item in found] == expected
    assert all(item.fixes[0] == "apply the softmax along the last axis (dim=-1)" for item in found)

from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.double_softmax import DoubleSoftmax
from trainvet.statistics import Facts, Loss

NAN = float("nan")


def facts(expects="logits", made="softmax", kind="cross_entropy", function="cross_entropy", framework="torch", **more):
    return Facts(
        framework, losses=(Loss("loss", kind, 10, 64, function=function, expects=expects, output_function=made, output_layer="head", **more),)
    )


def table(count=4, simplex=1.0, logs=0.0, units=10.0, low=0.0, high=0.9):
    values = {"simplex_share": simplex, "log_simplex_share": logs, "units": units, "min": low, "max": high}
    count = max([len(value) for value in values.values() if isinstance(value, list)], default=count)
    return {f"output.{key}": {"output": value if isinstance(value, list) else [value] * count} for key, value in values.items()}


def told(known, **values):
    """(step, first step) of what is found."""
    return [(item.step, item.first_step) for item in findings(DoubleSoftmax(), None, table(**values), known)]


BINARY = {"kind": "binary_cross_entropy", "function": "binary_cross_entropy"}
FIRES = {
    "softmax into cross-entropy": (facts(), {}),
    "whatever made it": (facts(made=""), {}),
    "in a composed loss": (facts(kind="unknown"), {}),
    "softmax into nll": (facts("log_probabilities", function="nll_loss"), {}),
    "softmax into kl_div": (facts("log_probabilities", kind="unknown", function="kl_div"), {}),
    "softmax into nll, rounded": (facts("log_probabilities", function="nll_loss"), {"simplex": 0.4}),
    "logits into nll": (facts("log_probabilities", "linear", function="nll_loss"), {"simplex": 0.0, "low": -3.0, "high": 2.0}),
    "sigmoid into logits": (facts(made="sigmoid", **BINARY), {"units": 1.0, "simplex": 0.0}),
    "softmax of two into binary logits": (facts(**BINARY), {"units": 2.0}),
    "outside [0, 1]": (facts("probabilities", ""), {"simplex": 0.0, "low": -0.002}),
    "above 1": (facts("probabilities", ""), {"simplex": 0.0, "high": 1.002}),
    "a layer without activation": (facts("probabilities", "linear", **BINARY), {"simplex": 0.0, "units": 1.0, "low": 0.2, "high": 0.8}),
    "tanh into probabilities": (facts("probabilities", "tanh", **BINARY), {"simplex": 0.0, "units": 1.0, "low": -0.4, "high": 0.8}),
}
QUIET = {
    "logits": (facts(made="linear"), {"simplex": 0.0, "low": -2.0, "high": 3.0}),
    "logits that lie in [0, 1]": (facts(made="linear"), {"simplex": 0.99}),
    "log-probabilities into cross-entropy": (facts(made="log_softmax"), {"simplex": 0.0, "logs": 1.0, "low": -4.0, "high": -0.1}),
    "log-probabilities into nll": (facts("log_probabilities", "log_softmax"), {"simplex": 0.0, "logs": 1.0, "low": -4.0, "high": 0.0}),
    "logarithm of probabilities into nll": (facts("log_probabilities", "log"), {"simplex": 0.0, "logs": 1.0, "low": -9.0, "high": 0.0}),
    "scores below 0 into nll": (facts("log_probabilities", ""), {"simplex": 0.0, "logs": 0.0, "low": -9.0, "high": 0.0}),
    "unnormalised, with the normaliser added by hand": (
        facts("log_probabilities", "linear", kind="unknown"),
        {"simplex": 0.0, "low": -3.0, "high": 2.0},
    ),
    "softmax into probabilities": (facts("probabilities"), {}),
    "a mixture of softmaxes": (facts("probabilities", "linear"), {}),
    "sigmoid into probabilities": (facts("probabilities", "sigmoid", **BINARY), {"simplex": 0.0, "units": 1.0}),
    "binary logits": (facts(made="linear", **BINARY), {"simplex": 0.0, "units": 1.0, "low": 0.1, "high": 0.7}),
    "rounding": (facts("probabilities", ""), {"simplex": 0.0, "low": -0.0005, "high": 1.0005}),
    "squared error": (facts("values", kind="regression"), {}),
    "least squares on a sigmoid": (facts("values", "sigmoid", kind="regression"), {"simplex": 0.0, "units": 1.0}),
    "unknown": (facts(""), {}),
    "no loss": (Facts(), {}),
    "one unit": (facts(), {"units": 1.0}),
    "nan": (facts("probabilities", "linear"), {"simplex": 0.0, "low": NAN, "high": NAN}),
    "two batches": (facts(), {"count": 2}),
}


@pytest.mark.parametrize(("known", "values"), FIRES.values(), ids=FIRES)
def test_fires(known, values):
    assert told(known, **values) == [(2, 0)]


@pytest.mark.parametrize(("known", "values"), QUIET.values(), ids=QUIET)
def test_quiet(known, values):
    assert told(known, **values) == []


def test_three_batches_in_a_row():
    assert told(facts(made=""), simplex=[1.0, 1.0, 0.9, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0]) == [(8, 6)]


def test_told_once_per_loss():
    assert told(facts(made=""), simplex=[1.0] * 3 + [0.0] * 3 + [1.0] * 9) == [(2, 0)]


def test_it_is_an_error_that_names_layer_and_remedy():
    (found,) = findings(DoubleSoftmax(), None, table(), facts())
    assert (found.severity, found.subjects) == (Severity.ERROR, ("head",))
    assert found.fixes == ("remove softmax from head: cross_entropy applies its own",)
    (found,) = findings(DoubleSoftmax(), None, table(simplex=0.0, low=-1.0), facts("probabilities", "linear", framework="keras", **BINARY))
    assert found.fixes == ("build the loss with from_logits=True, or give head activation='sigmoid'",)
    assert found.causes[0].startswith("the loss is told")
    (found,) = findings(DoubleSoftmax(), None, table(), facts("log_probabilities", function="nll_loss"))
    assert "log_softmax" in found.fixes[0]


def test_a_loss_that_becomes_known_later():
    rule = DoubleSoftmax()
    run = snapshots(None, table(8))
    assert drive(rule, run[:2]) == []
    assert rule.missing() == "what the loss expects is not known"
    list(rule.begin(facts()))
    assert [item.step for snapshot in run[2:] for item in rule.check(snapshot)] == [4]
    assert rule.missing() == ""
    list(rule.begin(facts()))
    assert list(rule.check(run[7])) == []


def test_missing_evidence_is_said():
    rule = DoubleSoftmax()
    drive(rule, snapshots(None, table(2)), facts())
    assert rule.missing() == "2 of 3 sampled batches"
    list(rule.begin(facts("values", kind="regression")))
    assert rule.missing() == "no loss over classes whose input is known"

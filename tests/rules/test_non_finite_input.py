from __future__ import annotations

import pytest

from tests.series import findings
from trainvet.finding import Severity
from trainvet.rules.non_finite_input import NonFiniteInput


def told(tracks, columns):
    return [(item.step, item.severity, item.subjects) for item in findings(NonFiniteInput(), tracks, columns)]


def data(**written):
    return {"input.nan": {"input": written.get("nan", "0 x6")}, "input.inf": {"input": written.get("inf", "0 x6")}}


@pytest.mark.parametrize("kind", ["nan", "inf"])
@pytest.mark.parametrize("loss", ["1, 1, nan x4", "1, 1, inf x4"])
def test_a_bad_batch_that_spoils_the_loss(kind, loss):
    assert told({"loss.value": loss}, data(**{kind: "0, 0, 5, 0, 0, 0"})) == [(2, Severity.ERROR, ("input",))]


def test_a_gradient_alone_is_enough():
    """Some kernels turn a NaN into 0 on the way to the loss."""
    assert told({"loss.value": "1 x6", "run.gradient_norm": "1, 1, nan x4"}, data(nan="0, 0, 5, 5, 5, 5")) == [(2, Severity.ERROR, ("input",))]
    assert told({"loss.value": "1 x6"}, {**data(nan="0, 0, 5, 5, 5, 5"), "gradient.nan": {"w": "0, 0, 3, 3, 3, 3"}}) == [
        (2, Severity.ERROR, ("input",))
    ]


def test_without_a_witness_it_is_bad():
    assert told({}, data(nan="0, 5, 0")) == [(1, Severity.ERROR, ("input",))]


def test_values_that_are_masked_are_information_at_the_third_sample():
    assert told({"loss.value": "1 x6", "run.gradient_norm": "1 x6"}, data(nan="5 x6")) == [(2, Severity.INFO, ("input",))]
    assert told({"loss.value": "1 x6"}, data(nan="5, 5, 0, 0, 0, 0")) == []


def test_labels_count_too_and_nothing_is_nothing():
    assert told({"loss.value": "1, nan"}, {"label.nan": {"label": "0, 2"}, "label.inf": {"label": "0, 0"}}) == [(1, Severity.ERROR, ("label",))]
    assert told({"loss.value": "nan x6"}, data()) == []
    assert NonFiniteInput().missing() == "a sampled batch with floating inputs"

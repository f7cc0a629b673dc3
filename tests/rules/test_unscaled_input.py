from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.unscaled_input import UnscaledInput
from trainvet.statistics import Facts, Layer, Subject

USUAL = {"min": -3, "max": 3, "integers": 0, "channel_offset": 0.2, "channel_std_max": 1.1, "constant_features": 0, "count": 50}


def table(length=12, **changes):
    return {f"input.{key}": {"input": [value] * length} for key, value in {**USUAL, **changes}.items()}


def told(facts=None, **changes):
    return [(item.step, item.severity) for item in findings(UnscaledInput(), None, table(**changes), facts)]


WARNED = [(9, Severity.WARNING)]  # the tenth batch of 50 samples


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"min": 0, "max": 255, "integers": 1, "channel_std_max": 80}, WARNED),
        ({"min": 0, "max": 33, "integers": 1}, WARNED),
        ({"min": 0, "max": 32, "integers": 1}, []),
        ({"min": -1, "max": 33, "integers": 1}, []),
        ({"min": 0, "max": 1}, []),
        ({"channel_std_max": 10.1}, WARNED),
        ({"channel_std_max": 9.9}, []),
        ({"channel_offset": 3.1, "max": 10.1}, WARNED),
        ({"channel_offset": 2.9, "max": 10.1}, []),
        ({"channel_offset": 50, "max": 1}, []),  # a nearly white background
        ({"channel_std_max": 0.009}, [(9, Severity.INFO)]),
        ({"constant_features": 3}, [(9, Severity.INFO)]),
        ({"count": 40}, []),
        ({"channel_std_max": float("nan"), "channel_offset": float("nan")}, []),
    ],
)
def test_margins(changes, expected):
    assert told(**changes) == expected


def test_the_fix_for_pixels():
    (found,) = findings(UnscaledInput(), None, table(min=0, max=255, integers=1, channel_std_max=80))
    assert found.fixes[0] == "divide the inputs by 255"
    assert (found.first_step, found.subjects) == (0, ("input",))


@pytest.mark.parametrize(
    "facts",
    [
        Facts(subjects=(Subject("input", "input", dtype="int64"),)),
        Facts(layers=(Layer("scale", "Rescaling", "norm", depth=0), Layer("a", "Dense", "linear", depth=1, owns=True))),
        Facts(layers=(Layer("norm", "BatchNorm2d", "batch_norm", depth=2, owns=True), Layer("a", "Conv2d", "convolution", depth=3, owns=True))),
        Facts(layers=(Layer("ids", "Embedding", "embedding", depth=0, owns=True),)),
    ],
)
def test_what_is_not_judged(facts):
    assert run(UnscaledInput(), None, table(max=255, channel_std_max=80), facts) == []


def test_a_later_normalisation_does_not_help():
    facts = Facts(layers=(Layer("a", "Linear", "linear", depth=0, owns=True), Layer("norm", "BatchNorm1d", "batch_norm", depth=1, owns=True)))
    assert told(facts, channel_std_max=80) == WARNED


def test_coverage():
    rule = UnscaledInput()
    assert rule.missing() == "0 of 500 samples"

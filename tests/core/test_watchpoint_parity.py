"""Every condition that MindInsight's debugger offers, written as watchpoints with its own default numbers, each at its margin."""

from __future__ import annotations

import math

import pytest

from tests.series import drive, snapshots
from trainvet import Watchpoint

SIGMOID = 1 / (1 + math.exp(-16.2))

# name, the watchpoint, and samples of one subject that are quiet, then one that is not
CONDITIONS = [
    ("weight_initialization", lambda: Watchpoint("weight.zero_share", above=0.9999, until=0), {"weight.zero_share": ([0.99], [1.0])}),
    ("weight_overflow nan", lambda: Watchpoint("weight.nan", above=0), {"weight.nan": ([0], [1])}),
    ("weight_overflow inf", lambda: Watchpoint("weight.inf", above=0), {"weight.inf": ([0], [1])}),
    ("weight_too_large abs_mean", lambda: Watchpoint("weight.abs_mean", above=1.5), {"weight.abs_mean": ([1.5], [1.51])}),
    ("weight_too_large max", lambda: Watchpoint("weight.max", above=3), {"weight.max": ([3], [3.1])}),
    ("weight_too_large min", lambda: Watchpoint("weight.min", above=-3), {"weight.min": ([-3], [-2.9])}),
    ("weight_too_small mean", lambda: Watchpoint("weight.mean", below=0.1), {"weight.mean": ([0.1], [0.09])}),
    ("weight_not_changed", lambda: Watchpoint("update.close", above=0), {"update.close": ([0], [1])}),
    ("weight_change_too_large", lambda: Watchpoint("update.abs_mean_ratio", above=0.1), {"update.abs_mean_ratio": ([0.1], [0.101])}),
    ("weight_change_too_large, recommended", lambda: Watchpoint("update.abs_mean_ratio", above=1), {"update.abs_mean_ratio": ([1], [1.1])}),
    ("weight_change_too_small", lambda: Watchpoint("update.abs_mean_ratio", below=1e-4), {"update.abs_mean_ratio": ([1e-4], [9e-5])}),
    ("gradient_vanishing", lambda: Watchpoint("gradient.abs_mean", below=1e-9), {"gradient.abs_mean": ([1e-9], [9e-10])}),
    ("gradient_too_large", lambda: Watchpoint("gradient.max", above=10), {"gradient.max": ([10], [11])}),
    ("gradient_exploding", lambda: Watchpoint("gradient.inf", above=0), {"gradient.inf": ([0], [2])}),
    (
        "activation_range tanh",
        lambda: Watchpoint("activation.share", inside=(-math.tanh(8.8), math.tanh(8.8)), below=0.001),
        {f"activation.share[{-math.tanh(8.8)!r},{math.tanh(8.8)!r}]": ([0.001], [0.0009])},
    ),
    (
        "activation_range sigmoid",
        lambda: Watchpoint("activation.share", inside=(1 - SIGMOID, SIGMOID), below=0.001),
        {f"activation.share[{1 - SIGMOID!r},{SIGMOID!r}]": ([0.001], [0.0009])},
    ),
    (
        "activation_range relu",
        lambda: Watchpoint("activation.share", inside=(-1, 0), above=0.999),
        {"activation.share[-1.0,0.0]": ([0.999], [0.9991])},
    ),
    (
        "activation_range max_min",
        lambda: Watchpoint("activation.range", above=5),
        {"activation.max": ([3, 3], [3]), "activation.min": ([-2, 0], [-2.5])},
    ),
    ("tensor_overflow", lambda: Watchpoint("activation.nan", above=0), {"activation.nan": ([0], [1])}),
    ("tensor_too_large", lambda: Watchpoint("activation.abs_max", above=100), {"activation.abs_max": ([100], [101])}),
    ("tensor_too_small", lambda: Watchpoint("activation.abs_mean", below=0.01), {"activation.abs_mean": ([0.01], [0.009])}),
    ("tensor_range", lambda: Watchpoint("output.share", inside=(0, 1), above=0.5), {"output.share[0.0,1.0]": ([0.5], [0.51])}),
    ("tensor_all_zero", lambda: Watchpoint("activation.zero_share", above=0.9999), {"activation.zero_share": ([0.999], [1.0])}),
]


@pytest.mark.parametrize(("build", "written"), [(build, written) for _, build, written in CONDITIONS], ids=[name for name, _, _ in CONDITIONS])
def test_each_condition_fires_beyond_its_limit_and_not_at_it(build, written):
    quiet = {key: {"a.b": before} for key, (before, _) in written.items()}
    loud = {key: {"a.b": after} for key, (_, after) in written.items()}
    assert drive(build(), snapshots(None, quiet)) == []
    (finding,) = drive(build(), snapshots(None, loud))
    assert finding.subjects == ("a.b",)
    assert finding.code == "WP100"


def test_a_limit_for_the_first_step_only():
    watch = Watchpoint("weight.zero_share", above=0.9999, until=0)
    assert drive(watch, snapshots(None, {"weight.zero_share": {"a": "0.5, 1, 1"}})) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"statistic": "activation.share", "above": 0.5}, "needs inside"),
        ({"statistic": "activation.max", "inside": (0, 1), "above": 0.5}, "needs inside"),
        ({"statistic": "activation.share", "inside": (1, 0), "above": 0.5}, "low <= high"),
        ({"statistic": "activation.share", "inside": (float("nan"), 0), "above": 0.5}, "low <= high"),
        ({"statistic": "gradient.share", "inside": (0, 1), "above": 0.5}, "no share of elements"),
        ({"statistic": "weight.zero_share", "above": 0.5, "until": -1}, "until"),
        ({"statistic": "loss.range", "above": 0.5}, "unknown statistic"),
    ],
)
def test_what_makes_no_sense_is_refused_at_construction(arguments, text):
    with pytest.raises(ValueError, match=text):
        Watchpoint(arguments.pop("statistic"), **arguments)

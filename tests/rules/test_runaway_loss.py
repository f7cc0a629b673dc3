from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import KINDS, SEEDS, falling, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.runaway_loss import RunawayLoss, noise_of_median

FIRES = [
    ("1 x40, 3 x40", 79),
    ("1 x10, 3 x30", 39),  # the earliest possible step
    ("1 x40, 1.06 x40", 79),
    ("-1 x40, -0.94 x40", 79),
    ("0 x40, 0.001 x40", 79),
    ("3..1 x40, 1 x120, 2.1 x40", 199),  # more than half of the progress
    ("4e10, 1e20, 4e16..2e16 x19, 2e25 x2, 3e21..1e21 x60", 59),  # an explosion that decays is its own noise
    ("1 x200, 1..50 x100", 239),
    ("3..-3 x100, 1 x40", 139),
]
QUIET = [
    "1 x40, 3 x39",
    "1 x10, 3 x29",
    "1 x40, 1.04 x40",
    "-1 x40, -0.96 x40",
    "3..1 x40, 1 x120, 1.8 x40",
    "3..1 x40, 1 x120, 2.9 x20, 1 x20, 2.9 x20",  # two bad windows, not in a row
    "1 x60",
    "3..1 x300",
    "1..-40 x300",
    "1e-9..1e-12 x200",
]


def loss(written, **more):
    return {"loss.value": written, **more}


@pytest.mark.parametrize(("written", "step"), FIRES)
def test_fires(written, step):
    assert [item[0] for item in run(RunawayLoss(), loss(written))][:1] == [step]


@pytest.mark.parametrize("written", QUIET)
def test_quiet(written):
    assert run(RunawayLoss(), loss(written)) == []


@pytest.mark.parametrize(("shift", "told"), [(1.7, 0), (6.0, 1)])
def test_six_times_the_noise_of_a_median(shift, told):
    """6 · 1.25 · σ of the differences / √20 is 2.4 times the noise of single losses, more where it looks correlated by chance."""
    for seed in SEEDS:
        values = 1 + 0.5 * noise("gaussian", 300, seed)
        values[200:] += np.median(values[:10]) + 0.5 * shift - 1
        found = drive(RunawayLoss(returned=1e9), snapshots(loss(values)))
        assert len(found) == told, seed


def test_noise_of_a_median_of_twenty():
    """Independent noise by its differences (√2 on the safe side), correlated noise by what a median of 20 really does."""
    for kind, factor in (("gaussian", 2**0.5), ("ar", 1.3)):
        values = noise(kind, 40_000, 0)
        true = np.std(np.median(values.reshape(-1, 20), axis=1))
        measured = np.median([noise_of_median(values[end - 201 : end]) for end in range(201, 40_000, 100)])
        assert true * factor * 0.6 < measured < true * factor * 1.2, kind
    assert noise_of_median(np.ones(40)) == 0


def test_worse_than_the_start_is_an_error_and_half_given_back_a_warning():
    found = findings(RunawayLoss(), loss("3..1 x40, 1 x120, 2.2 x60, 4 x60"))
    assert [(item.step, item.severity) for item in found] == [(199, Severity.WARNING), (259, Severity.ERROR)]
    assert (found[0].first_step, found[0].where) == (160, "loss")
    assert "progress is given back" in found[0].message
    assert found[1].evidence["lowest"] == 1.0


def test_told_again_only_after_two_good_windows():
    assert len(run(RunawayLoss(), loss("1 x40, 3 x60, 1 x20, 3 x60"))) == 1
    assert [step for step, _ in run(RunawayLoss(), loss("1 x40, 3 x60, 1 x40, 3 x60"))] == [79, 179]


def test_steps_are_applied_steps():
    assert run(RunawayLoss(), loss("1 x40, 3 x40", **{"run.skipped": "0 x50, 1 x1, 0 x29"})) == []
    assert run(RunawayLoss(), loss("1 x40, 3 x41", **{"run.skipped": "0 x50, 1 x1, 0 x30"})) == [(80, "LO101")]


def test_each_loss_is_judged_by_itself():
    both = {"loss of optimizer 0": "1 x80", "loss of optimizer 1": "1 x40, 3 x40"}
    assert [item.where for item in findings(RunawayLoss(), {"loss.value": both})] == ["loss of optimizer 1"]


def test_the_advice_holds_the_rate_in_force():
    rates = {"optimizer.learning_rate": {"group 0": "0.001 x80, 0.5 x60", "group 1": "0.02 x80, 1e-6 x60"}}
    assert findings(RunawayLoss(), loss("1 x40, 3 x100", **rates))[0].fixes[0] == "set the learning rate to about 0.002 (now 0.02)"


def test_nan_counts_as_bad():
    assert [item.step for item in drive(RunawayLoss(), snapshots(loss("1 x40, nan x40")))] == [79]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "size"), [(150, 0.1), (400, 0.2), (2500, 0.1)])
def test_quiet_on_healthy_losses(kind, length, size):
    for seed in SEEDS:
        assert drive(RunawayLoss(), snapshots(loss(falling(kind, length, seed, size)), block=50)) == [], seed


@pytest.mark.parametrize("kind", ["gaussian", "log-normal", "t3", "bimodal", "near-zero"])
def test_quiet_on_a_loss_that_does_not_move(kind):
    for seed in SEEDS:
        assert drive(RunawayLoss(), snapshots(loss(1 + 0.2 * noise(kind, 2000, seed)), block=50)) == [], seed


@pytest.mark.parametrize("rate", [0.005, 0.02, 0.1])
def test_exponential_growth_is_seen_under_noise(rate):
    values = np.exp(np.minimum(rate * np.arange(200), 60)) * (1 + 0.1 * noise("gaussian", 200, 0))
    assert drive(RunawayLoss(), snapshots(loss(values)))[0].step <= 119


@given(st.floats(1e-30, 1e30), st.integers(1, 200))
def test_a_constant_loss_is_quiet(value, length):
    assert drive(RunawayLoss(), snapshots(loss([value] * length), block=40)) == []


def test_missing_evidence_is_said():
    rule = RunawayLoss()
    assert rule.missing() == "0 of 40 applied steps"
    drive(rule, snapshots(loss("1 x39")))
    assert rule.missing() == "39 of 40 applied steps"
    list(rule.check(snapshots(loss("1 x40"))[-1]))
    assert rule.missing() == ""

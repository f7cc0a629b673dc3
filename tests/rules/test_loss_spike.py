from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import KINDS, SEEDS, falling, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.loss_spike import LossSpike

CALM = "2..1 x20, 1 x60"  # 80 steps

FIRES = [
    (f"{CALM}, 3 x3, 1 x20", 85),  # seen at step 82, over when two of the last five are left
    (f"{CALM}, 3, 1, 3, 1, 3, 1 x20", 85),
    (f"{CALM}, 1 x200, 3 x50, 1 x20", 332),
    (f"{CALM}, 3 x80", 132),  # seen at step 82, there for 50 steps more
    ("-1..-2 x20, -2 x60, -0.5 x3, -2 x20", 85),
    ("2..1 x20, 1 x240, 1.9 x10, 1 x20", 272),  # only the last 256 count
    ("2..1 x20, 1 x44, 3 x6, 1 x20", 72),  # the earliest possible one: seen at step 68
    ("3..1 x20, 1 x300, 1.09 x5, 1 x20", 327),  # 5 % of the progress
    (f"{CALM}, 2.01 x3, 1 x20", 85),
]
QUIET = [
    "2..1 x20, 1 x41, 3 x3, 1 x20",
    f"{CALM}, 3 x2, 1 x20",
    f"{CALM}, 3, 1, 3, 1, 1, 3, 1 x20",
    f"{CALM}, 1.99 x3, 1 x20",  # below the highest before
    "2..1 x20, 1 x237, 1.9 x3, 1 x20",
    "3..1 x20, 1 x300, 1.07 x5, 1 x20",  # 5 % of the progress
    f"{CALM}, 1..0 x200",
    f"{CALM}, 1 x300",
]


def loss(written, **more):
    return {"loss.value": written, **more}


@pytest.mark.parametrize(("written", "step"), FIRES)
def test_fires(written, step):
    assert run(LossSpike(), loss(written)) == [(step, "LO102")]


@pytest.mark.parametrize("written", QUIET)
def test_quiet(written):
    assert run(LossSpike(), loss(written)) == []


@pytest.mark.parametrize(("height", "told"), [(4.6, 0), (5.4, 1)])
def test_the_margin_of_five_sigma(height, told):
    """Noise of two values: the highest is 1 above the median and σ is 1.48."""
    values = np.array([0.0, 1.0, -1.0] * 66)
    values[190:195] = height * 1.4826
    assert len(findings(LossSpike(), loss(values))) == told


def test_a_spike_that_heals_is_information():
    (found,) = findings(LossSpike(), loss(f"{CALM}, 3 x30, 1 x20"))
    assert (found.severity, found.first_step, found.step, found.where) == (Severity.INFO, 80, 112, "loss")
    assert "was back after 32 steps" in found.message


def test_a_spike_that_stays_is_a_warning():
    (found,) = findings(LossSpike(), loss(f"{CALM}, 3 x200"))
    assert (found.severity, found.first_step) == (Severity.WARNING, 80)
    assert "stayed there for 50 steps" in found.message


def test_the_step_before_the_verdict_is_quiet():
    assert run(LossSpike(), loss(f"{CALM}, 3 x3, 1 x2")) == []
    assert run(LossSpike(), loss(f"{CALM}, 3 x52")) == []


def test_silent_for_fifty_steps_after_it_began():
    """The first is seen at step 82, the second has its third high loss at step 85 + d."""
    assert [step for step, _ in run(LossSpike(), loss(f"{CALM}, 3 x3, 1 x44, 9 x3, 1 x30"))] == [85]
    assert [step for step, _ in run(LossSpike(), loss(f"{CALM}, 3 x3, 1 x48, 9 x3, 1 x30"))] == [85, 136]


def test_the_third_spike_within_1000_steps_is_a_warning():
    found = findings(LossSpike(), loss(f"{CALM}, 3 x4, 1 x300, 3 x4, 1 x300, 3 x4, 1 x300, 3 x4, 1 x20"))
    assert [item.severity for item in found] == [Severity.INFO, Severity.INFO, Severity.WARNING, Severity.INFO]
    assert "3 times in 1,000 steps" in found[2].message
    apart = findings(LossSpike(), loss(f"{CALM}, 3 x4, 1 x600, 3 x4, 1 x600, 3 x4, 1 x20"))
    assert [item.severity for item in apart] == [Severity.INFO] * 3


def test_each_loss_by_itself_and_applied_steps_only():
    both = {"loss of optimizer 0": f"{CALM}, 1 x60", "loss of optimizer 1": f"{CALM}, 3 x3, 1 x57"}
    assert [item.where for item in findings(LossSpike(), {"loss.value": both})] == ["loss of optimizer 1"]
    assert run(LossSpike(), loss(f"{CALM}, 3 x3, 1 x20", **{"run.skipped": "0 x80, 1, 0 x22"})) == []


def test_the_advice_holds_the_rate_in_force():
    rates = {"optimizer.learning_rate": "0.5 x82, 0.1 x4, 0.9 x60"}
    assert findings(LossSpike(), loss(f"{CALM}, 3 x3, 1 x60", **rates))[0].fixes[-1] == "set the learning rate to about 0.05 (now 0.1)"


def test_nan_counts_as_above():
    assert [item.step for item in drive(LossSpike(), snapshots(loss(f"{CALM}, nan x3, 1 x20")))] == [85]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "size"), [(300, 0.2), (2500, 0.1)])
def test_quiet_on_healthy_losses(kind, length, size):
    """One event in 96 runs, of either severity, would be more than the rank test allows for; correlated noise is not exchangeable."""
    spikes = [drive(LossSpike(), snapshots(loss(falling(kind, length, seed, size)), block=50)) for seed in SEEDS]
    assert [item for found in spikes for item in found if item.severity > Severity.INFO] == []
    assert kind == "ar" or not any(spikes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_warning_on_noise_that_does_not_move(kind):
    for seed in SEEDS:
        found = drive(LossSpike(), snapshots(loss(noise(kind, 2500, seed)), block=50))
        assert [item for item in found if item.severity > Severity.INFO] == [], seed


@given(st.floats(1e-30, 1e30), st.integers(1, 300))
def test_a_constant_loss_is_quiet(value, length):
    assert drive(LossSpike(), snapshots(loss([value] * length), block=40)) == []


@pytest.mark.parametrize("block", [2, 5, 19, 20, 21, 64, 500])
def test_any_block_gives_the_same_findings(block):
    values = 1 + 0.1 * noise("gaussian", 700, 0)
    for place, length, height in ((80, 12, 3), (200, 3, 6), (330, 100, 9), (560, 30, 12)):
        values[place : place + length] += height
    told = [(item.first_step, item.step) for item in drive(LossSpike(), snapshots(loss(values), block=block))]
    assert told == [(79, 94), (200, 205), (330, 382), (560, 592)]


def test_missing_evidence_is_said():
    rule = LossSpike()
    drive(rule, snapshots(loss("1 x68")))
    assert rule.missing() == "68 of 69 applied steps"
    list(rule.check(snapshots(loss("1 x69"))[-1]))
    assert rule.missing() == ""

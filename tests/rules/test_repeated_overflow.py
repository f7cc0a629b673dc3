from __future__ import annotations

import numpy as np
import pytest

from tests.rules.test_collapsed_loss_scale import scaler
from tests.series import drive, findings, run, snapshots
from trainvet.rules.repeated_overflow import RepeatedOverflow, binomial_tail
from trainvet.statistics import Facts


def skips(*steps, length=600):
    """A run that skips the given steps, at a constant scale."""
    flags = np.zeros(length)
    flags[list(steps)] = 1
    return {"run.skipped": flags, "run.loss_scale": [1024.0] * length}


def interval(steps):
    return Facts(growth_interval=steps, loss_scaler=True)


FIRES = [
    (skips(30, 40, 50, 60, 70), 2000, 70),  # five in 200 steps: 5.9e-5
    (skips(30, 31, 32, 33, 34), 2000, 34),
    (skips(20, 21, 22, 23, 24), 2000, 24),  # the earliest possible step
    (skips(30, 80, 130, 180, 229), 2000, 229),
    (skips(30, 40, 50, 60, 70), 10**9, 70),
    (skips(30, 40, 50, 60, 70), 0, 70),  # unknown
    (skips(*range(0, 600, 10)), 2000, 140),  # never 20 clean steps in a row: settled after 100
    (skips(*range(0, 600, 5)), 100, 165),  # 14 of 200 where 4 are expected
    (skips(*range(0, 600, 2)), 10, 224),  # 63 of 200 where 40 are expected
]
QUIET = [
    (skips(30, 40, 50, 60), 2000),  # four: 6.5e-4
    (skips(30, 80, 130, 180, 230), 2000),
    (skips(19, 20, 21, 22, 23, length=300), 2000),  # the first is calibration
    (skips(*range(20), *range(40, 44)), 2000),
    (skips(*range(12)), 10),  # calibration at a small growth interval
    (scaler("1 x8, 0 x300", start=2.0**24), 2000),
    (skips(*range(0, 100, 5), 105, 110, 115, 120), 2000),
    (skips(*range(0, 96, 5), 99, 105, 110, 115, 120), 2000),  # the hundredth step is calibration, too
    (skips(*range(100)), 2000),
    (skips(*range(10, 600, 11)), 10),  # one after every growth
    (skips(*range(20, 600, 21)), 20),
    (skips(*range(4, 600, 5)), 4),
    (skips(*range(1, 600, 2)), 1),
    (skips(*range(5, 600, 6)), 10),
    ({"run.skipped": "0 x30, 1 x30"}, 0),  # the guard drops updates, and there is no scaler
]


@pytest.mark.parametrize(("tracks", "growth", "step"), FIRES)
def test_fires(tracks, growth, step):
    assert [item[0] for item in run(RepeatedOverflow(), tracks, facts=interval(growth))] == [step]


@pytest.mark.parametrize(("tracks", "growth"), QUIET)
def test_quiet(tracks, growth):
    assert run(RepeatedOverflow(), tracks, facts=interval(growth)) == []


def test_one_skip_after_every_growth_of_2000_steps():
    tracks = skips(*range(2000, 20_000, 2001), length=20_000)
    assert drive(RepeatedOverflow(), snapshots(tracks, block=50), interval(2000)) == []


def test_chance_alone_is_quiet_at_the_expected_rate():
    for growth, rate in ((2000, 1 / 1000), (100, 1 / 51), (20, 1 / 11), (10, 1 / 6)):
        for seed in range(5):
            flags = np.random.default_rng(seed).random(5000) < rate
            tracks = {"run.skipped": flags, "run.loss_scale": [1.0] * 5000}
            assert drive(RepeatedOverflow(), snapshots(tracks, block=50), interval(growth)) == [], (growth, seed)


def test_told_again_only_after_it_was_clear():
    """Clear: at most one skip in 200 steps."""
    first = (30, 40, 50, 60, 70)
    assert [step for step, _ in run(RepeatedOverflow(), skips(*first, *range(80, 600, 80), length=700))] == [70]
    again = (500, 510, 520, 530, 540)
    assert [step for step, _ in run(RepeatedOverflow(), skips(*first, *again))] == [70, 540]
    edge = (259, 260, 261, 262)
    assert [step for step, _ in run(RepeatedOverflow(), skips(*first, *edge))] == [70]
    assert [step for step, _ in run(RepeatedOverflow(), skips(*first, 261, 262, 263, 264, 265))] == [70, 264]
    assert [step for step, _ in run(RepeatedOverflow(), skips(*first, 260, 261, 262, 263, 264, 265))] == [70], "two in 200 steps before each of them"


def test_what_is_said():
    (found,) = findings(RepeatedOverflow(), skips(30, 40, 50, 60, 70), facts=interval(2000))
    assert found.message == "5 of the last 71 steps were skipped because gradients overflowed"
    assert (found.first_step, found.where, found.evidence["loss scale"], found.evidence["of"]) == (30, "loss scale", 1024.0, 71)
    assert found.evidence["chance"] == pytest.approx(5.9e-5, rel=0.01)
    (late,) = findings(RepeatedOverflow(), skips(300, 310, 320, 330, 340))
    assert late.message.startswith("5 of the last 200 steps")


def test_the_numbers_are_settings():
    assert run(RepeatedOverflow(chance=1e-3), skips(30, 40, 50, 60)) == [(60, "LS101")]
    assert run(RepeatedOverflow(window=1000, chance=1e-3), skips(30, 40, 50, 60, 70)) == []
    assert run(RepeatedOverflow(calibration=10), skips(*range(20)))[:1] == [(14, "LS101")]
    assert run(RepeatedOverflow(clean=5), skips(5, 6, 7, 8, 9)) == [(9, "LS101")]


def test_the_tail_of_the_binomial():
    assert binomial_tail(0, 200, 0.01) == 1
    assert binomial_tail(1, 3, 0.5) == pytest.approx(0.875)
    assert binomial_tail(3, 3, 0.5) == pytest.approx(0.125)
    assert binomial_tail(4, 3, 0.5) == pytest.approx(0, abs=1e-12)
    assert binomial_tail(7, 200, 1.0) == 1


def test_missing_evidence_is_said():
    rule = RepeatedOverflow()
    assert rule.missing() == "0 of 20 steps applied in a row"
    drive(rule, snapshots(skips(5, length=20)))
    assert rule.missing() == "14 of 20 steps applied in a row"
    drive(rule, snapshots(skips(length=20)))
    assert rule.missing() == ""

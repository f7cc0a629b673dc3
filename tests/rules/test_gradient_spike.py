from __future__ import annotations

import numpy as np
import pytest

from tests.noise import KINDS, SEEDS, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.gradient_spike import GradientSpike
from trainvet.statistics import Facts

CALM = "1 x120"


def norm(written, **more):
    return {"run.gradient_norm": written, **more}


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        (f"{CALM}, 3.1 x3, 1 x20", [122]),
        (f"{CALM}, 2.9 x3, 1 x20", []),
        (f"{CALM}, 9 x2, 1 x20", []),
        (f"{CALM}, 9, 1, 9, 1, 9, 1 x20", [124]),
        (f"{CALM}, 9, 1, 9, 1, 1, 9, 1 x20", []),
        ("1 x98, 9 x3, 1 x20", [100]),  # the earliest possible one
        ("1 x95, 9 x3, 1 x20", []),
        (f"{CALM}, 9 x3, 1 x20, 30 x3, 1 x40", [122]),  # within 50 steps
        (f"{CALM}, 9 x3, 1 x50, 30 x3, 1 x40", [122, 175]),
        ("9 x3, 1 x300, 5 x3, 1 x20", [305]),  # only the last 256 count
        ("9 x3, 1 x200, 5 x3, 1 x20", []),
        ("1 x60, 3.5, 1 x60, 3.4, 3.6, 3.4, 3.6, 3.4, 1 x20", []),  # two of five above the highest
        ("1..20 x600", []),  # a slow rise
        ("0 x300, 1 x9", []),
        ("1 x600", []),
    ],
)
def test_three_of_five(written, steps):
    assert [step for step, code in run(GradientSpike(), norm(written)) if code == "GR103"] == steps


def test_the_third_within_1000_steps_is_a_warning():
    close = f"{CALM}, 4 x3, 1 x300, 4 x3, 1 x300, 4 x3, 1 x50"
    assert [item.severity for item in findings(GradientSpike(), norm(close))] == [Severity.INFO, Severity.INFO, Severity.WARNING]
    apart = f"{CALM}, 4 x3, 1 x600, 4 x3, 1 x600, 4 x3, 1 x50"
    assert [item.severity for item in findings(GradientSpike(), norm(apart))] == [Severity.INFO] * 3


def test_the_message_and_the_advice():
    rates = {"optimizer.learning_rate": "0.1 x200"}
    (found,) = findings(GradientSpike(), norm(f"{CALM}, 8 x3, 1 x20", **rates), facts=Facts(clipping=50.0))
    assert found.message == "the gradient norm jumped from 1 to 8"
    assert found.first_step == 120
    assert found.fixes[0] == "clip the gradient norm at 1, its usual value (now 50)"
    assert found.fixes[-1] == "set the learning rate to about 0.05 (now 0.1)"


@pytest.mark.parametrize(("height", "count"), [(4.8, 0), (5.2, 1)])
def test_the_margin_of_five_sigma(height, count):
    """Logarithms of two values: σ is 1.48 * 0.3."""
    values = np.exp(0.3 * np.array([0.0, 1.0, -1.0] * 60))
    values[150:154] = np.exp(height * 1.4826 * 0.3)
    assert len(findings(GradientSpike(), norm(values))) == count


def test_what_is_not_finite_is_another_rules():
    assert drive(GradientSpike(), snapshots(norm("nan x300"))) == []
    assert len(drive(GradientSpike(), snapshots(norm(f"{CALM}, inf x9")))) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.3, 0.6])
def test_healthy_norms(kind, size):
    """10,000 steps with ten seeds: hardly any spike, never three."""
    for seed in (*SEEDS, 8, 9):
        values = (0.5 + 2 * np.exp(-np.arange(10_000) / 800)) * np.exp(size * noise(kind, 10_000, seed).clip(-4, 4))
        found = drive(GradientSpike(), snapshots(norm(values), block=500))
        assert [item for item in found if item.severity > Severity.INFO] == [], seed
        assert len(found) <= 2


def test_any_block_gives_the_same_findings():
    values = np.exp(0.3 * noise("gaussian", 900, 0))
    for place in (130, 430, 760):
        values[place : place + 4] *= 30
    told = [drive(GradientSpike(), snapshots(norm(values), block=block)) for block in (1, 4, 97, 900)]
    assert all([item.to_dict() for item in found] == [item.to_dict() for item in told[0]] for found in told)
    assert len(told[0]) == 3


def test_missing_evidence_is_said():
    rule = GradientSpike()
    assert rule.missing() == "0 of 101 measured steps"
    drive(rule, snapshots(norm("1 x101")))
    assert rule.missing() == ""

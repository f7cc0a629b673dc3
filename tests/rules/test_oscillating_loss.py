from __future__ import annotations

import numpy as np
import pytest

from tests.noise import KINDS, SEEDS, falling
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.oscillating_loss import OscillatingLoss


def loss(values):
    return {"loss.value": values}


def swinging(share, length=640, seed=0):
    """A falling loss; ``share`` of its noise changes sign from step to step."""
    normal = np.random.default_rng(seed).normal(size=length)
    swing = np.where(np.arange(length) % 2, 1.0, -1.0)
    return np.linspace(3, 1, length) + 0.1 * (share**0.5 * swing + (1 - share) ** 0.5 * normal)


@pytest.mark.parametrize(("share", "count"), [(1.0, 1), (0.8, 1), (0.2, 0), (0.0, 0)])
def test_the_margin(share, count):
    assert len(findings(OscillatingLoss(), loss(swinging(share)))) == count


def test_two_of_three_windows_after_the_first():
    assert run(OscillatingLoss(), loss(swinging(1.0, 191))) == []
    assert run(OscillatingLoss(), loss(swinging(1.0, 192))) == [(191, "LO106")]
    (found,) = findings(OscillatingLoss(), loss(swinging(1.0)))
    assert (found.severity, found.first_step) == (Severity.INFO, 64)


def test_told_again_after_it_was_gone():
    calm = np.linspace(1, 0.9, 320)
    assert len(findings(OscillatingLoss(), loss(np.concatenate([swinging(1.0, 320), calm, swinging(1.0, 320)])))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_quiet_on_healthy_losses(kind):
    assert [drive(OscillatingLoss(), snapshots(loss(falling(kind, 3000, seed)), block=50)) for seed in SEEDS] == [[]] * len(SEEDS)


@pytest.mark.parametrize("written", ["nan x400", "1 x400", "2..1 x400"])
def test_no_noise_no_verdict(written):
    assert drive(OscillatingLoss(), snapshots(loss(written))) == []


def test_the_advice_holds_the_rate_and_missing_evidence_is_said():
    rule = OscillatingLoss()
    assert rule.missing() == "0 of 192 applied steps"
    (found,) = drive(rule, snapshots({"loss.value": swinging(1.0), "optimizer.learning_rate": "0.4 x640"}))
    assert found.fixes[0] == "set the learning rate to about 0.2 (now 0.4)"
    assert rule.missing() == ""

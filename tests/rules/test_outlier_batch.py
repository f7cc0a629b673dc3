from __future__ import annotations

import numpy as np
import pytest

from tests.noise import KINDS, SEEDS, falling, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.outlier_batch import OutlierBatch

# 100 steps from 2 to 1, then losses of 1 and 1.1
CALM = "2..1.1 x20, " + ", ".join(["1, 1.1, 0.9"] * 100)


def loss(written):
    return {"loss.value": written}


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        (f"{CALM}, 1.31, 1 x9", [320]),  # three times 0.1 above the median
        (f"{CALM}, 1.29, 1 x9", []),
        (f"{CALM}, 1.31 x9", [320]),  # the second is no longer above them all
        (f"{CALM}, 5, 1 x48, 20, 1 x60", [320]),  # within 50 steps
        (f"{CALM}, 5, 1 x50, 20, 1 x60", [320, 371]),
        ("1, 1.1, 0.9, " * 21 + "1, 1.4, 1", [64]),
        ("1, 1.1, 0.9, " * 21 + "1.4, 1", []),
        ("30..1 x20, " + "1, 1.1, 0.9, " * 100 + "2, 1", []),  # 5 % of the progress from 23 to 1
        ("30..1 x20, " + "1, 1.1, 0.9, " * 100 + "2.2, 1", [320]),
        ("1 x300, 5, 1", []),  # a loss without any noise says nothing of it
    ],
)
def test_one_batch(written, steps):
    assert [step for step, code in run(OutlierBatch(), loss(written)) if code == "LO103"] == steps


def test_it_is_information_and_names_the_step():
    (found,) = findings(OutlierBatch(), loss(f"{CALM}, 7, 1 x9"))
    assert (found.severity, found.where) == (Severity.INFO, "loss, step 320")
    assert "was 7; the 256 before it reached 1.1, 1 in the median" in found.message


def test_nan_is_another_rules():
    assert drive(OutlierBatch(), snapshots(loss(f"{CALM}, nan, 1 x9"))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_rare_on_healthy_losses(kind):
    told = [drive(OutlierBatch(), snapshots(loss(falling(kind, 3000, seed)), block=50)) for seed in SEEDS]
    assert sum(map(len, told)) <= 4
    assert all(item.severity == Severity.INFO for found in told for item in found)


def test_any_block_gives_the_same_findings():
    values = 1 + 0.1 * noise("gaussian", 700, 0)
    values[[80, 340, 620]] += 5
    for block in (3, 20, 64, 700):
        assert [item.step for item in drive(OutlierBatch(), snapshots(loss(np.array(values)), block=block))] == [80, 340, 620]


def test_missing_evidence_is_said():
    rule = OutlierBatch()
    drive(rule, snapshots(loss("1 x64")))
    assert rule.missing() == "64 of 65 applied steps"
    list(rule.check(snapshots(loss("1 x65"))[-1]))
    assert rule.missing() == ""

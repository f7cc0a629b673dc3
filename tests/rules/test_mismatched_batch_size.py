from __future__ import annotations

import pytest

from tests.series import drive, findings, snapshots
from trainvet.finding import Severity
from trainvet.rules.mismatched_batch_size import MismatchedBatchSize


def told(noise, size="64 x300"):
    found = findings(MismatchedBatchSize(), {"run.noise_scale": noise, "run.batch_size": size})
    return [(item.step, item.message.split("much ")[1].split()[0]) for item in found]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("6.3 x50", [(49, "larger")]),
        ("6.5 x50", []),
        ("639 x50", []),
        ("641 x50", [(49, "smaller")]),
        ("641 x49", []),
        ("6.3 x26, 64 x24", [(49, "larger")]),  # the median
        ("6.3 x24, 64 x26", []),
        ("6.3 x150", [(49, "larger")]),
        ("6.3 x50, 64 x50, 641 x50", [(49, "larger"), (149, "smaller")]),
        ("_ x10, 6.3, " * 50 + "1", [(549, "larger")]),  # sampled now and then
        ("nan x50", []),
        ("-5 x50", []),
    ],
)
def test_a_factor_of_ten(written, expected):
    assert told(written, "64 x600") == expected


def test_it_is_information_with_a_size():
    (found,) = findings(MismatchedBatchSize(), {"run.noise_scale": "6.3 x50", "run.batch_size": "64 x50"})
    assert (found.severity, found.first_step) == (Severity.INFO, 0)
    assert found.fixes == ("use a smaller batch for more steps: about 6 samples, and a learning rate to match",)


def test_without_the_batch_size_no_verdict():
    assert drive(MismatchedBatchSize(), snapshots({"run.noise_scale": "1 x100"})) == []


def test_missing_evidence_is_said():
    rule = MismatchedBatchSize()
    assert rule.missing() == "0 of 50 estimates (they need gradient accumulation)"
    drive(rule, snapshots({"run.noise_scale": "1 x50"}))
    assert rule.missing() == ""

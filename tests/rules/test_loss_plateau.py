from __future__ import annotations

import pytest

from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.loss_plateau import LossPlateau
from trainvet.statistics import Facts


def loss(written, rate=None):
    return {"loss.value": written} | ({"optimizer.learning_rate": rate} if rate else {})


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        ("2..1 x200, 1 x1100", [1219]),  # lowest in the window that ends at step 219
        ("2..1 x200, 1 x1019", []),
        ("2..1.7 x200, 1.7 x1100", []),  # a fifth was not learnt
        ("2..1.5 x200, 1.5 x1100", [1219]),
        ("2..1 x1300", []),
        ("2..1 x200, 1 x1500, 1..0.5 x100, 0.5 x1100", [1219, 2819]),  # a plateau of its own
        ("-1..-2 x200, -2 x1100", [1219]),
    ],
)
def test_a_thousand_steps(written, steps):
    assert [step for step, _ in run(LossPlateau(), loss(written))] == steps


def test_two_epochs():
    facts = Facts(batches_per_epoch=800)
    assert run(LossPlateau(), loss("2..1 x200, 1 x1600"), facts=facts) == []
    assert run(LossPlateau(), loss("2..1 x200, 1 x1640"), facts=facts) == [(1819, "LO105")]
    assert len(run(LossPlateau(), loss("2..1 x200, 1 x1100"), facts=Facts(batches_per_epoch=800, accumulation=2))) == 1


def test_the_rate_must_be_a_tenth_of_its_peak():
    assert run(LossPlateau(), loss("2..1 x200, 1 x1100", "0.1 x300, 0.009 x1000")) == []
    (found,) = findings(LossPlateau(), loss("2..1 x200, 1 x1100", "0.1 x300, 0.011 x1000"))
    assert found.fixes[0] == "set the learning rate to about 0.001 (now 0.011)"


def test_it_is_information_since_the_lowest_point():
    (found,) = findings(LossPlateau(), loss("2..1 x200, 1 x1100"))
    assert (found.severity, found.first_step) == (Severity.INFO, 219)


def test_nan_gives_no_verdict():
    assert drive(LossPlateau(), snapshots(loss("2..1 x200, nan x1200"))) == []


def test_missing_evidence_is_said():
    rule = LossPlateau()
    assert rule.missing() == "0 of 1020 applied steps"
    drive(rule, snapshots(loss("1 x1020")))
    assert rule.missing() == ""

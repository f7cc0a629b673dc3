from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import KINDS, SEEDS, falling, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.loss_not_decreasing import LossNotDecreasing
from trainvet.statistics import Facts, Loss, Schedule

FIRES = [
    ("1 x200", 199),  # the earliest possible step
    ("1..2 x200", 199),
    ("-1 x200", 199),
    ("1..0.995 x200", 199),
    ("5 x10, 4.1 x190", 199),  # an early drop alone is no learning
    ("1e-9 x200", 199),
]
QUIET = [
    "1 x199",
    "1..0.95 x200",
    "-1..-1.05 x200",
    "5..1 x30, 1 x200",  # learnt at once
    "1..-3 x200",
    "3..0.5 x100, 0.5 x900",
    "1e-9..1e-10 x200",
]


def loss(written, **more):
    return {"loss.value": written, **more}


def rates(written):
    return {"optimizer.learning_rate": written}


@pytest.mark.parametrize(("written", "step"), FIRES)
def test_fires(written, step):
    assert run(LossNotDecreasing(), loss(written)) == [(step, "LO104")]


@pytest.mark.parametrize("written", QUIET)
def test_quiet(written):
    assert run(LossNotDecreasing(), loss(written)) == []


@pytest.mark.parametrize(("drop", "told"), [(0.0045, 1), (0.0056, 0), (0.013, 0)])  # 0.013: an auto-encoder on soft targets
def test_a_steady_drop_of_half_a_percent_between_the_outermost_five_blocks(drop, told):
    values = np.concatenate([np.full(100, 1.0), np.full(100, 1 - drop)]) + 1e-4 * noise("gaussian", 200, 0)
    assert len(run(LossNotDecreasing(), loss(values))) == told


@pytest.mark.parametrize(("low", "told"), [(1.0, 1), (0.97, 0)])
def test_the_margin_of_the_rank_test(low, told):
    """Of 100 pairs 80 (z of 2.27) or 81 (z of 2.34) have the higher loss in the first half; the median drops by 3 %."""
    means = [1.03] * 5 + [0.98, 0.96] + [1.03] * 3 + [1.0] * 5 + [low] + [1.0] * 4
    assert len(run(LossNotDecreasing(), loss(np.repeat(means, 10)))) == told


@pytest.mark.parametrize(("size", "told"), [(0.17, 1), (0.25, 0)])
def test_noise_must_leave_no_room_for_a_fifth(size, told):
    """Two standard errors are 0.94 times the size of blocks that alternate."""
    means = 1 + size * np.array([-1, 1] * 10)
    assert len(run(LossNotDecreasing(), loss(np.repeat(means, 10)), facts=Facts(planned_steps=300))) == told


@pytest.mark.parametrize(("level", "told"), [(0.81, 1), (0.79, 0)])
def test_what_is_learnt_within_the_first_steps_counts_from_a_fifth_on(level, told):
    assert len(run(LossNotDecreasing(), loss(f"1 x10, {level} x190"))) == told


def test_what_is_learnt_before_it_is_as_good_as_guessing_does_not_count():
    known = Facts(losses=(Loss("loss", "cross_entropy", 10, 64),))
    assert [item.severity for item in findings(LossNotDecreasing(), loss("3 x10, 2.303 x190"), facts=known)] == [Severity.ERROR]
    assert findings(LossNotDecreasing(), loss("3 x10, 1.8 x190"), facts=known) == []
    assert findings(LossNotDecreasing(), loss("3 x10, 2.303 x190")) == []


@pytest.mark.parametrize(("level", "severity"), [(2.27, Severity.ERROR), (2.24, Severity.WARNING)])
def test_an_error_where_nothing_is_better_than_guessing(level, severity):
    """0.98 ln 10 = 2.257."""
    (found,) = findings(LossNotDecreasing(), loss(f"{level} x200"), facts=Facts(losses=(Loss("loss", "cross_entropy", 10, 64),)))
    assert found.severity == severity
    assert found.evidence["guessing"] == pytest.approx(np.log(10))


@pytest.mark.parametrize(
    "known",
    [
        Loss("loss", "cross_entropy", 10, 64, weighted=True),
        Loss("loss", "cross_entropy", 10, 64, reduction="sum"),
        Loss("loss", "regression", 0, 64),
        Loss("other", "cross_entropy", 10, 64),
    ],
)
def test_guessing_is_not_known_for_other_losses(known):
    (found,) = findings(LossNotDecreasing(), loss("2.303 x200"), facts=Facts(losses=(known,)))
    assert (found.severity, "guessing" in found.evidence) == (Severity.WARNING, False)
    binary = Facts(losses=(Loss("loss", "binary_cross_entropy", 2, 64),))
    assert findings(LossNotDecreasing(), loss("0.69 x200"), facts=binary)[0].severity == Severity.ERROR


def test_told_once_and_off_for_good_once_learning_is_proven():
    assert len(run(LossNotDecreasing(), loss("1 x900"))) == 1
    assert run(LossNotDecreasing(), loss("2..1 x200, 1 x800")) == []


def test_skipped_steps_do_not_count():
    assert run(LossNotDecreasing(), loss("1 x201", **{"run.skipped": "0 x100, 1, 0 x100"})) == [(200, "LO104")]
    assert run(LossNotDecreasing(), loss("1 x200", **{"run.skipped": "0 x100, 1, 0 x99"})) == []


@pytest.mark.parametrize("exempt", [{"resumed": True}, {"pretrained": True}])
def test_quiet_where_it_did_not_start_from_scratch(exempt):
    rule = LossNotDecreasing()
    assert run(rule, loss("1 x400"), facts=Facts(**exempt)) == []
    drive(rule, snapshots(loss("1 x400")), Facts(**exempt))
    assert "not judged" in rule.missing()


def test_a_warm_up_does_not_count():
    """Half of the peak is reached at step 150; 200 steps with that rate are there at step 350."""
    tracks = loss("1 x500", **rates("0..0.01 x300, 0.01 x200"))
    assert run(LossNotDecreasing(), tracks) == [(349, "LO104")]
    assert run(LossNotDecreasing(), loss("1 x340", **rates("0..0.01 x300, 0.01 x200"))) == []


def test_a_planned_peak_is_waited_for():
    curve = np.concatenate([np.linspace(0, 0.01, 600), np.full(400, 0.01)])
    planned = Facts(schedules=(Schedule("group 0", "LambdaLR", "step", curve),), planned_steps=1000)
    assert run(LossNotDecreasing(), loss("1 x1000", **rates(curve)), facts=planned) == [(499, "LO104")]
    assert run(LossNotDecreasing(), loss("1 x490", **rates(curve[:490])), facts=planned) == []


def test_a_decay_after_the_peak_is_no_warm_up():
    assert run(LossNotDecreasing(), loss("1 x200", **rates("0.01..0 x200"))) == [(199, "LO104")]


def test_two_thousand_samples_or_an_epoch():
    """Batches of 5: 200 steps are 1,000 samples. An epoch of 250 steps is over first."""
    known = Facts(losses=(Loss("loss", "unknown", 0, 5),))
    assert run(LossNotDecreasing(), loss("1 x500"), facts=known) == [(399, "LO104")]
    assert run(LossNotDecreasing(), loss("1 x500"), facts=known, samples=250) == [(259, "LO104")]


def test_a_long_run_is_given_more_time():
    assert run(LossNotDecreasing(), loss("1 x700"), facts=Facts(planned_steps=20_000)) == []
    assert run(LossNotDecreasing(), loss("1 x900"), facts=Facts(planned_steps=20_000)) == [(799, "LO104")]


def test_noise_that_hides_a_healthy_drop_is_said_to_do_so():
    rule = LossNotDecreasing()
    assert drive(rule, snapshots(loss(1 + 0.8 * noise("gaussian", 300, 1))), Facts(planned_steps=3000)) == []
    assert rule.missing() == "undecided after 300 steps: the loss is too noisy"


def test_each_loss_by_itself():
    both = {"loss of optimizer 0": "2..1 x200", "loss of optimizer 1": "1 x200"}
    assert [item.where for item in findings(LossNotDecreasing(), {"loss.value": both})] == ["loss of optimizer 1"]


def test_the_advice_holds_the_rate_in_force():
    (found,) = findings(LossNotDecreasing(), loss("1 x250", **rates("0.02 x200, 0.5 x50")))
    assert found.fixes[-1] == "try learning rates between 0.002 and 0.2 (now 0.02)"
    assert (found.first_step, found.where) == (0, "loss")


def test_nan_is_no_learning():
    assert [item.step for item in drive(LossNotDecreasing(), snapshots(loss("2..1 x150, nan x50")))] == [199]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "size"), [(220, 0.3), (800, 0.15), (10_000, 0.15)])
def test_quiet_on_healthy_losses(kind, length, size):
    for seed in SEEDS:
        values = falling(kind, length, seed, size)[:1700]
        assert drive(LossNotDecreasing(), snapshots(loss(values), block=50), Facts(planned_steps=length)) == [], seed


@pytest.mark.parametrize("kind", ["gaussian", "log-normal", "t3", "bimodal", "near-zero"])
def test_noise_alone_is_no_learning(kind):
    found = [drive(LossNotDecreasing(), snapshots(loss(1 + 0.1 * noise(kind, 200, seed)), block=50)) for seed in range(20)]
    assert sum(map(bool, found)) >= 19


@given(st.floats(1e-30, 1e30), st.integers(0, 199))
def test_no_verdict_before_step_200(value, length):
    assert drive(LossNotDecreasing(), snapshots(loss([value] * length), block=40)) == []


def test_missing_evidence_is_said():
    rule = LossNotDecreasing()
    drive(rule, snapshots(loss("1 x199")))
    assert rule.missing() == "190 of 200 applied steps with at least half of the peak learning rate"
    list(rule.check(snapshots(loss("1 x200"))[-1]))
    assert rule.missing() == ""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.noise import KINDS, SEEDS, noise
from tests.series import drive, findings, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.exploding_gradient import ExplodingGradient
from trainvet.statistics import Facts

FIRES = [
    ("1 x120, 5.1 x40", 159),  # the earliest possible step
    ("1 x300, 6 x100", 339),
    ("1 x120, 1..400 x200", 159),
    ("101 x1, 1 x119", 119),
    ("1 x9, 101, 1 x110", 119),
    ("1e7..10 x10, 1 x120", 119),
    ("5 x200, 0.01 x2000, 6 x60", 2239),  # above the last 1,000 steps and above the first
]
QUIET = [
    "1 x120, 4.9 x400",
    "1 x120, 9 x39",
    "1 x120, 9 x20, 1 x20, 9 x20, 1 x20",
    "99 x1, 1 x119",
    "101 x1, 1 x118",
    "1 x10, 101, 1 x109",  # the eleventh step
    "1 x20, 9 x500",
    "5 x200, 0.01 x2000, 1 x100",  # a converged run that wakes up
    "1..10 x5000",
    "1..1e-6 x400",
    "0 x400, 1 x100",  # nothing to compare with
    "1e9 x10, 0 x400",
]


def norm(written, **more):
    return {"run.gradient_norm": written, **more}


def rates(written):
    return {"optimizer.learning_rate": written}


def sparse(values, every):
    """The norms of a light run: dense over the first 10 steps, then every few."""
    return {step: value for step, value in enumerate(values) if step < 10 or (step - 9) % every == 0}


@pytest.mark.parametrize(("written", "step"), FIRES)
def test_fires(written, step):
    assert run(ExplodingGradient(), norm(written)) == [(step, "GR101")]


def test_an_explosion_at_the_start_began_where_the_limit_was_crossed():
    assert [item.first_step for item in findings(ExplodingGradient(), norm("1 x4, 150, 1 x2, 300, 1 x112"))] == [4]
    assert findings(ExplodingGradient(), norm("1 x4, 150, 1 x2, 300, 1 x112"))[0].evidence["gradient norm"] == 300


@pytest.mark.parametrize("written", QUIET)
def test_quiet(written):
    assert run(ExplodingGradient(), norm(written)) == []


@pytest.mark.parametrize(("every", "step"), [(1, 339), (2, 349), (5, 344), (20, 509), (50, 759)])
def test_where_only_sampled_steps_are_measured(every, step):
    """A window has at least 5 norms, so that it takes longer where they are rare."""
    values = np.concatenate([np.ones(300), np.full(500, 6.0)])
    (found,) = findings(ExplodingGradient(), norm(sparse(values, every)), facts=Facts(every_step=False))
    assert found.step == step
    assert findings(ExplodingGradient(), norm(sparse(np.concatenate([np.ones(300), np.full(500, 4.9)]), every))) == []
    assert findings(ExplodingGradient(), norm(sparse([200.0] + [1.0] * 600, every)))[0].first_step == 0


def test_told_once_and_again_after_two_calm_windows():
    assert len(run(ExplodingGradient(), norm("1 x120, 9 x200, 1 x20, 9 x100"))) == 1
    assert [step for step, _ in run(ExplodingGradient(), norm("1 x120, 9 x80, 1 x40, 9 x100"))] == [159, 279]


def test_quiet_while_the_rate_rises():
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **rates("0..0.1 x320"))) == []
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **rates("0.1 x320"))) == [(159, "GR101")]


def test_quiet_while_the_loss_is_at_its_lowest():
    """A loss without a bottom, or a net whose norms grow as it learns."""
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **{"loss.value": "1..-5 x320"})) == []
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **{"loss.value": "2..1 x120, 1.2 x200"})) == [(159, "GR101")]
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **{"loss.value": "2..1 x200, 1.2 x120"})) == [(239, "GR101")]
    two = {"loss.value": {"loss of optimizer 0": "2..1 x320", "loss of optimizer 1": "1..2 x320"}}
    assert run(ExplodingGradient(), norm("1 x120, 9 x200", **two)) == [(159, "GR101")]


def test_norms_from_a_low_rate_are_no_reference():
    """The norm grows with the rate; 100 steps at half of the new rate are needed."""
    warm = rates("0.01 x300, 0.1 x300")
    assert run(ExplodingGradient(), norm("1 x300, 9 x300", **warm)) == []
    assert run(ExplodingGradient(), norm("1 x420, 9 x180", **warm)) == [(459, "GR101")]


def test_the_finding():
    (found,) = findings(ExplodingGradient(), norm("1.3 x120, 13 x40", **rates("0.1 x160")))
    assert (found.severity, found.first_step, found.where) == (Severity.ERROR, 120, "run")
    assert found.fixes[:2] == ("clip the gradient norm at 1.3 (the median of the healthy steps)", "set the learning rate to about 0.01 (now 0.1)")
    assert found.evidence == {"gradient norm": 13.0, "healthy": pytest.approx(1.3)}
    assert findings(ExplodingGradient(), norm("200 x1, 1 x119"))[0].fixes[0] == "clip the gradient norm at 1 (the median of the healthy steps)"


@pytest.mark.parametrize(("clipping", "severity"), [(0.0, Severity.ERROR), (1.0, Severity.INFO), (1.1, Severity.WARNING)])
def test_a_first_explosion_that_clipping_has_contained_is_information(clipping, severity):
    (found,) = findings(ExplodingGradient(), norm("200 x1, 1 x119"), facts=Facts(clipping=clipping))
    assert found.severity == severity


@pytest.mark.parametrize(
    ("clipping", "advice"), [(5.0, "lower the clipping threshold to 1.3 (now 5)"), (0.5, "set the learning rate to about 0.01 (now 0.1)")]
)
def test_a_warning_where_the_gradient_is_clipped(clipping, advice):
    (found,) = findings(ExplodingGradient(), norm("1.3 x120, 13 x40", **rates("0.1 x160")), facts=Facts(clipping=clipping))
    assert (found.severity, found.fixes[0]) == (Severity.WARNING, advice)


def test_where_the_gradient_is_largest():
    """On the sample before the finding, and for the start at its highest point."""
    at = (0, 1, 60, 130, 170)
    sizes = {"gradient.norm": {"rnn.weight": [1, 150, 1, 9, 1], "head.weight": [90, 2, 2, 2, 8]}}
    found = findings(ExplodingGradient(), norm("90, 150, 1 x118, 9 x80"), sizes, at=at)
    assert [(item.step, item.subjects, item.where) for item in found] == [
        (119, ("rnn.weight",), "gradient norm, largest in rnn.weight"),
        (159, ("rnn.weight",), "gradient norm, largest in rnn.weight"),
    ]


def test_each_optimizer_by_itself():
    both = {"gradients of optimizer 0": "1 x200", "gradients of optimizer 1": "1 x120, 9 x80"}
    assert [item.where for item in findings(ExplodingGradient(), {"run.gradient_norm": both})] == ["gradients of optimizer 1"]


def test_skipped_steps_do_not_count():
    assert run(ExplodingGradient(), norm("1 x120, 9 x2, 1 x80", **{"run.skipped": "0 x120, 1 x2, 0 x80"})) == []


def test_nan_counts_as_bad():
    assert [item.step for item in drive(ExplodingGradient(), snapshots(norm("1 x120, nan x40")))] == [159]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 50])
def test_quiet_on_healthy_norms(kind, every):
    """Falling, rising five-fold over the run, and level, with noise of a factor e^±0.5."""
    for seed in SEEDS:
        for begin, end in ((1.0, 0.05), (1.0, 5.0), (1.0, 1.0)):
            course = np.geomspace(begin, end, 1500) * np.exp(0.5 * np.clip(noise(kind, 1500, seed), -4, 4))
            assert drive(ExplodingGradient(), snapshots(norm(sparse(course, every)), block=50)) == [], (seed, end)


@given(st.floats(1e-30, 1e30), st.integers(1, 400))
def test_a_constant_norm_is_quiet(value, length):
    assert drive(ExplodingGradient(), snapshots(norm([value] * length), block=40)) == []


def test_missing_evidence_is_said():
    rule = ExplodingGradient()
    assert rule.missing() == "norms of 0 of 120 steps"
    drive(rule, snapshots(norm("1 x119")))
    assert rule.missing() == "norms of 119 of 120 steps"
    list(rule.check(snapshots(norm("1 x120"))[-1]))
    assert rule.missing() == ""


def test_a_first_gradient_that_only_falls_with_the_loss_is_no_explosion():
    """A separable problem learnt at once: norm 0.43 to 0.001, loss 2.3 to 0.001. An explosion is large beside its loss, too."""
    norm = "0.43 x3, 0.43..0.001 x30, 0.001 x117"
    assert run(ExplodingGradient(), {"run.gradient_norm": norm, "loss.value": "2.3 x3, 2.3..0.001 x30, 0.001 x117"}) == []
    exploded = {"run.gradient_norm": "1.7e7 x2, 1.6 x148", "loss.value": "3.5e5 x2, 1.1 x148"}
    assert [code for _, code in run(ExplodingGradient(), exploded)] == ["GR101"]

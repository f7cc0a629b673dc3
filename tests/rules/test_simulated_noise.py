"""10,000 steps of a healthy loss and gradient norm under six kinds of noise: no rule warns. A flat loss is found, by LO104 and nothing else."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.noise import KINDS, falling, noise
from tests.series import snapshots
from trainvet.finding import Severity
from trainvet.monitor import Monitor
from trainvet.rule import catalogue
from trainvet.selection import choose
from trainvet.statistics import Facts, Loss, Optimizer, Schedule

LENGTH = 10_000
WHOLE = tuple(code for code, kind in catalogue().items() if any(key in kind.reads for key in ("loss.value", "run.gradient_norm")))
PLAN = Facts(
    framework="torch",
    planned_steps=LENGTH,
    batches_per_epoch=500,
    optimizers=(Optimizer("SGD", "SGD", "sgd", groups=("group 0",)),),
    schedules=(Schedule("group 0", "none", "step", np.full(LENGTH, 0.01)),),
    losses=(Loss("loss", "unknown"),),
)


def spoken(loss, norm):
    """Codes of all findings of at least a warning, in a run with these series."""
    monitor = Monitor(choose(WHOLE))
    monitor.begin(PLAN)
    tracks = {"loss.value": loss, "run.gradient_norm": norm, "optimizer.learning_rate": np.full(LENGTH, 0.01)}
    for snapshot in snapshots(tracks, block=50, samples=500):
        monitor.observe(snapshot)
    report = monitor.end()
    assert not report.errors
    return sorted({item.code for head in report.findings for item in (head, *head.consequences) if item.severity >= Severity.WARNING})


@functools.cache
def norms(kind, seed):
    """A gradient norm that settles, with the same kind of noise."""
    return (0.5 + 2 * np.exp(-np.arange(LENGTH) / 800)) * np.exp(0.3 * noise(kind, LENGTH, seed + 100).clip(-4, 4))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_a_falling_loss_is_no_reason_to_warn(kind, seed):
    assert spoken(falling(kind, LENGTH, seed), norms(kind, seed)) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "near-zero"])
def test_a_flat_loss_is_found_and_only_that(kind):
    assert spoken(2.3 + 0.1 * noise(kind, LENGTH, 0), norms(kind, 0)) == ["LO104"]

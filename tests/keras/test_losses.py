"""The loss of each step from Keras' running mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainvet.integrations.keras.losses import Instant, RunningMean


class Metric:
    """Keras' Mean in float32."""

    def __init__(self):
        self.total = self.count = np.float32(0)

    def add(self, loss, weight):
        self.total = np.float32(self.total + np.float32(loss) * np.float32(weight))
        self.count = np.float32(self.count + np.float32(weight))
        return float(self.total / self.count)


def run(losses, weights, measured, blocks=None):
    """One epoch; returns what was handed over, and the series."""
    metric, series, told = Metric(), RunningMean(), {}
    for step, (loss, weight) in enumerate(zip(losses, weights, strict=True)):
        mean = metric.add(loss, weight)
        if step in measured:
            told |= dict(series.sampled(step, mean, float(metric.count), weight, loss if measured[step] else None))
        else:
            series.light(step, mean, 1)
    told |= dict(series.close(float(metric.count)))
    return told, series


def test_every_step_comes_back_from_the_running_mean():
    losses = np.random.default_rng(0).uniform(0.5, 2.0, 200)
    told, _ = run(losses, [32] * 200, {0: True, 50: True, 120: False})
    assert sorted(told) == list(range(200))
    np.testing.assert_allclose([told[step] for step in range(200)], losses, rtol=1e-3)


def test_a_smaller_last_batch_has_its_own_weight():
    losses = [1.0, 2.0, 3.0, 4.0, 10.0]
    told, _ = run(losses, [32, 32, 32, 32, 4], {0: True})
    np.testing.assert_allclose([told[step] for step in range(5)], losses, rtol=1e-5)
    told, _ = run(losses, [32, 32, 32, 32, 4], {0: True, 4: False})
    np.testing.assert_allclose([told[step] for step in range(5)], losses, rtol=1e-5)


def test_batches_of_unknown_size_are_not_guessed():
    told, _ = run([1.0] * 10, [32, 32, 7, 32, 32, 32, 32, 32, 32, 32], {0: True, 5: True})
    assert sorted(told) == [0, 5, 6, 7, 8, 9]


def test_a_metric_that_counts_batches():
    losses = [1.0, 5.0, 2.0, 3.0]
    told, _ = run(losses, [1, 1, 1, 1], {0: True, 2: False})
    np.testing.assert_allclose([told[step] for step in range(4)], losses, rtol=1e-5)


def test_a_small_loss_behind_a_large_mean_is_left_out():
    losses = [1000.0] * 5 + [1e-4] * 400
    told, _ = run(losses, [8] * 405, {0: True, 404: True})
    assert told[404] == 1e-4
    shown = sorted(told)[:-1]
    assert shown == list(range(len(shown)))
    assert 20 < len(shown) < 250
    assert all(abs(told[step] - losses[step]) < 0.05 for step in shown)


def test_the_first_non_finite_mean_is_told_once_and_the_next_epoch_starts_afresh():
    metric, series = Metric(), RunningMean()
    series.sampled(0, metric.add(1.0, 8), 8.0, 8, 1.0)
    assert not series.light(1, metric.add(2.0, 8), 1)
    assert series.light(2, metric.add(math.nan, 8), 1)
    assert dict(series.close(16.0)) == pytest.approx({1: 2.0})
    assert not series.light(3, metric.add(1.0, 8), 1)
    series.begin_epoch()
    assert not series.light(4, 0.5, 1)
    assert dict(series.close(8.0)) == {4: 0.5}


def test_blocks_give_their_mean():
    metric, series = Metric(), RunningMean()
    assert series.verify(float(np.float32(8)), 1, 8) == []
    for loss in (1.0, 2.0, 3.0, 6.0):
        mean = metric.add(loss, 8)
    series.light(3, mean, 4)
    for loss in (5.0, 7.0):
        mean = metric.add(loss, 8)
    assert dict(series.verify(float(metric.count), 2, 8)) == {3: 3.0}
    for loss in (1.0, 3.0):
        mean = metric.add(loss, 8)
    series.light(7, mean, 4)
    assert dict(series.close(float(metric.count))) == pytest.approx({7: 4.0})


def test_a_log_that_is_the_batch_loss():
    series = Instant()
    assert not series.light(0, 3.0, 1)
    assert series.light(1, math.nan, 1)
    assert series.sampled(2, 1.0, None, 8, None)[0] == (0, 3.0)

"""Schedules simulated on the host against Keras itself."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from trainvet.integrations.keras.schedules import describe, rates

S = keras.optimizers.schedules
STEPS = np.array([0, 1, 2, 9, 10, 11, 37, 50, 99, 100, 140, 400], dtype=np.float64)
SCHEDULES = {
    "exponential": S.ExponentialDecay(0.1, 20, 0.5),
    "staircase": S.ExponentialDecay(0.1, 20, 0.5, staircase=True),
    "piecewise": S.PiecewiseConstantDecay([10, 50], [1.0, 0.1, 0.01]),
    "polynomial": S.PolynomialDecay(0.1, 100, 0.001, power=2.0),
    "cycle": S.PolynomialDecay(0.1, 40, 0.001, cycle=True),
    "inverse time": S.InverseTimeDecay(0.1, 10, 0.5, staircase=True),
    "cosine": S.CosineDecay(0.1, 100, alpha=0.1),
    "warm-up": S.CosineDecay(0.0, 90, warmup_target=0.1, warmup_steps=10),
    "restarts": S.CosineDecayRestarts(0.1, 30, t_mul=1.0, m_mul=0.9),
    "longer restarts": S.CosineDecayRestarts(0.1, 30, t_mul=2.0, m_mul=0.9, alpha=0.01),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_are_those_of_keras(name):
    schedule = SCHEDULES[name]
    truth = [float(schedule(int(step))) for step in STEPS]
    np.testing.assert_allclose(rates(schedule, STEPS), truth, rtol=2e-4, atol=1e-7)


class Noam(S.LearningRateSchedule):
    def __call__(self, step):
        step = keras.ops.cast(step, "float32") + 1.0
        return keras.ops.minimum(step**-0.5, step * 100.0**-1.5)


def test_a_schedule_of_the_users_is_called_at_some_steps():
    steps = np.arange(1000.0)
    found = rates(Noam(), steps)
    truth = np.minimum((steps + 1) ** -0.5, (steps + 1) * 100.0**-1.5)
    np.testing.assert_allclose(found, truth, rtol=0.03)


class Broken(S.LearningRateSchedule):
    def __call__(self, step):
        raise RuntimeError("only inside a graph")


def test_what_cannot_be_evaluated_is_left_out():
    assert rates(Broken(), np.arange(5.0)) is None
    assert describe("SGD", Broken(), 100, 0) is None


def test_horizon_and_start():
    told = describe("Adam", SCHEDULES["warm-up"], 50, 20)
    assert (told.horizon, told.restarts, len(told.curve)) == (100.0, False, 50)
    assert told.curve[0] == pytest.approx(float(SCHEDULES["warm-up"](20)), rel=1e-4)
    assert describe("Adam", SCHEDULES["restarts"], 50, 0).restarts
    assert describe("Adam", SCHEDULES["piecewise"], 50, 0).horizon == 50.0
    assert describe("Adam", SCHEDULES["exponential"], 50, 0).horizon is None
    assert describe("Adam", SCHEDULES["exponential"], None, 0) is None

"""LR102 on torch's own schedulers, driven ahead as the probe does it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from trainvet.integrations.torch.schedules import Driven, simulate
from trainvet.rules.mismatched_schedule import MismatchedSchedule
from trainvet.statistics import Facts

EPOCHS, PER_EPOCH = 10, 40
STEPS = EPOCHS * PER_EPOCH

HEALTHY = {
    "one-cycle to its end": ("step", lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS)),
    "one-cycle over epochs": ("epoch", lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=EPOCHS)),
    "cosine": ("step", lambda o: schedulers.CosineAnnealingLR(o, STEPS)),
    "cosine over epochs": ("epoch", lambda o: schedulers.CosineAnnealingLR(o, EPOCHS)),
    "warm-up, then constant": ("step", lambda o: schedulers.LinearLR(o, 1e-3, total_iters=30)),
    "warm-up, then cosine": (
        "step",
        lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 1e-3, total_iters=40), schedulers.CosineAnnealingLR(o, STEPS - 40)], [40]),
    ),
    "milestones": ("epoch", lambda o: schedulers.MultiStepLR(o, [3, 6])),
    "steps": ("epoch", lambda o: schedulers.StepLR(o, 3)),
    "exponential": ("epoch", lambda o: schedulers.ExponentialLR(o, 0.95)),
    "constant factor": ("epoch", lambda o: schedulers.LambdaLR(o, lambda epoch: 1.0)),
    "constant": ("step", lambda o: schedulers.ConstantLR(o, 0.5, total_iters=20)),
    "polynomial": ("step", lambda o: schedulers.PolynomialLR(o, STEPS, power=2)),
    "warm restarts": ("step", lambda o: schedulers.CosineAnnealingWarmRestarts(o, 30)),
    "cyclic": ("step", lambda o: schedulers.CyclicLR(o, 1e-4, 0.1, step_size_up=20)),
    "plateau": ("epoch", lambda o: schedulers.ReduceLROnPlateau(o)),
    "inverse root": ("step", lambda o: schedulers.LambdaLR(o, lambda step: min((step + 1) / 40, (40 / (step + 1)) ** 0.5))),
}
FAULTY = {
    "one-cycle in steps, per epoch": ("epoch", lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS), "after every optimizer step"),
    "cosine in steps, per epoch": ("epoch", lambda o: schedulers.CosineAnnealingLR(o, STEPS), "after every optimizer step"),
    "cosine in epochs, per step": ("step", lambda o: schedulers.CosineAnnealingLR(o, EPOCHS), "after every epoch"),
    "steps in epochs, per step": ("step", lambda o: schedulers.StepLR(o, 3), "after every epoch"),
    "exponential per step": ("step", lambda o: schedulers.ExponentialLR(o, 0.95), "after every epoch"),
    "polynomial in epochs, per step": ("step", lambda o: schedulers.PolynomialLR(o, EPOCHS), "after every epoch"),
    "milestones in steps, per epoch": ("epoch", lambda o: schedulers.MultiStepLR(o, [200, 300]), "after every optimizer step"),
    "warm-up and cosine in steps, per epoch": (
        "epoch",
        lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 1e-3, total_iters=40), schedulers.CosineAnnealingLR(o, STEPS - 40)], [40]),
        "after every optimizer step",
    ),
}


def judged(interval, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    curves = simulate(Driven(make(optimizer), interval), ["group 0"], STEPS, PER_EPOCH)
    assert len(curves) == 1
    return list(MismatchedSchedule().begin(dataclasses.replace(Facts(), schedules=tuple(curves), planned_steps=STEPS)))


@pytest.mark.parametrize("name", HEALTHY)
def test_quiet(name):
    assert judged(*HEALTHY[name]) == []


@pytest.mark.parametrize("name", FAULTY)
def test_fires_and_says_how_to_step_it(name):
    interval, make, fix = FAULTY[name]
    (found,) = judged(interval, make)
    assert fix in found.fixes[0]

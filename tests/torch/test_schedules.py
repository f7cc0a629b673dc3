"""The schedule driven ahead on a copy, against the rates of a real run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tests.lightning.runs import Net, built, data, watched
from tests.torch.left_behind import plain
from trainvet.integrations.torch.schedules import Driven, simulate


def decay(module: nn.Module) -> Any:
    """A closure over the module, and a bound method of it, as people write them."""
    return lambda step: 1 / (1 + step + 0 * next(module.parameters()).numel())


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o, m: schedulers.StepLR(o, 3, 0.5),
    "CosineAnnealingLR": lambda o, m: schedulers.CosineAnnealingLR(o, 16),
    "OneCycleLR": lambda o, m: schedulers.OneCycleLR(o, 0.1, total_steps=16),
    "OneCycleLR, too short": lambda o, m: schedulers.OneCycleLR(o, 0.1, total_steps=32, cycle_momentum=False),
    "warm-up, then cosine": lambda o, m: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 12)], milestones=[4]
    ),
    "two at once": lambda o, m: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]),
    "LambdaLR over the module": lambda o, m: schedulers.LambdaLR(o, decay(m)),
    "LambdaLR of the module": lambda o, m: schedulers.LambdaLR(o, m.factor),
    "warm restarts": lambda o, m: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "cyclic": lambda o, m: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
}
DRIVEN: dict[str, dict[str, Any]] = {
    "step": {"interval": "step"},
    "epoch": {"interval": "epoch"},
    "every third step": {"interval": "step", "frequency": 3},
    "every second epoch": {"interval": "epoch", "frequency": 2},
}


class Scheduled(Net):
    name, how = "StepLR", "step"

    def factor(self, step: int) -> float:
        return 1 / (1 + step)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[:4].parameters(), "lr": 0.05}, {"params": self.net[4:].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": SCHEDULES[self.name](optimizer, self), **DRIVEN[self.how]}}


CASES = [(name, "step", 1) for name in SCHEDULES]
CASES += [("StepLR", how, accumulation) for how in DRIVEN for accumulation in (1, 3)]


@pytest.mark.parametrize(("name", "how", "accumulation"), CASES)
def test_the_curve_is_the_one_of_the_real_run(tmp_path: Path, name: str, how: str, accumulation: int) -> None:
    module = built(type("Case", (Scheduled,), {"name": name, "how": how}))
    seen, diagnostics = watched(tmp_path, module, max_epochs=4 if "epoch" in how else 2, accumulate_grad_batches=accumulation)
    curves = seen.plans[0].schedules
    assert [curve.group for curve in curves] == ["SGD/0", "SGD/1"]
    for curve in curves:
        real = seen.series("optimizer.learning_rate", curve.group)
        assert len(curve.curve) == len(real) == diagnostics.report.steps
        np.testing.assert_allclose(curve.curve, list(real.values()), rtol=1e-9, atol=1e-15)


def test_past_the_end_of_one_cycle_the_rate_stays_and_the_horizon_says_so() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (curve,) = simulate(Driven(schedulers.OneCycleLR(optimizer, 0.1, total_steps=10), "step"), ["SGD"], 30, 5, module)
    assert curve.horizon == 10
    assert curve.curve[29] == curve.curve[10]


@pytest.mark.parametrize(
    ("make", "horizon", "restarts"),
    [
        (lambda o: schedulers.CosineAnnealingLR(o, 7), 7, False),
        (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 7), None, True),
        (lambda o: schedulers.StepLR(o, 7), None, False),
        (lambda o: schedulers.PolynomialLR(o, 7), 7, False),
        (lambda o: schedulers.LinearLR(o, 0.1, 1.0, total_iters=7), None, False),
        (lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.CosineAnnealingLR(o, 7)], milestones=[3]), 10, False),
    ],
)
def test_horizons(make: Any, horizon: float | None, restarts: bool) -> None:
    module = nn.Linear(2, 2)
    (step,) = simulate(Driven(make(torch.optim.SGD(module.parameters(), lr=0.1)), "step"), ["SGD"], 20, 5)
    (epoch,) = simulate(Driven(make(torch.optim.SGD(module.parameters(), lr=0.1)), "epoch", 2), ["SGD"], 20, 5)
    assert (step.horizon, step.restarts) == (horizon, restarts)
    assert epoch.horizon == (None if horizon is None else horizon * 10)


def test_a_schedule_that_follows_a_metric_is_not_simulated() -> None:
    module = nn.Linear(2, 2)
    plateau = schedulers.ReduceLROnPlateau(torch.optim.SGD(module.parameters(), lr=0.1))
    (schedule,) = simulate(Driven(plateau), ["SGD"], 20, 5)
    assert schedule.reactive
    assert len(schedule.curve) == 0


def test_what_cannot_be_copied_is_not_simulated() -> None:
    class Stubborn(schedulers.StepLR):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError

    module = nn.Linear(2, 2)
    assert simulate(Driven(Stubborn(torch.optim.SGD(module.parameters(), lr=0.1), 3), "step"), ["SGD"], 20, 5) == []
    step = schedulers.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 3)
    assert simulate(Driven(step, "step"), ["one", "too many"], 20, 5) == []


class Counts(nn.Module):
    """Counts how often a copy of it is made."""

    copies = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).copies += 1
        return self

    def factor(self, step: int) -> float:
        return math.exp(-step)


class Callable_:
    """A schedule object that holds the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, step: int) -> float:
        return 0.5**step


@pytest.mark.parametrize("form", ["closure", "method", "object"])
def test_no_weights_are_copied_and_nothing_real_moves(form: str) -> None:
    Counts.copies = 0
    module = Counts()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    module.layer(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    factor = {"closure": lambda step: module.factor(step), "method": module.factor, "object": Callable_(module)}[form]
    scheduler = schedulers.LambdaLR(optimizer, factor)
    before = plain([optimizer.state_dict(), {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}])
    (schedule,) = simulate(Driven(scheduler, "step"), ["Adam"], 20, 5, module)
    assert schedule.curve[3] == pytest.approx(0.1 * factor(3), rel=1e-5)
    assert Counts.copies == 0
    assert plain([optimizer.state_dict(), {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}]) == before
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)
    optimizer.step()
    scheduler.step()
    assert float(rate) == pytest.approx(0.1 * factor(1))


def test_a_module_that_steps_its_schedulers_in_its_own_way_is_not_simulated(tmp_path: Path) -> None:
    class Own(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(self.current_epoch)

    seen, _ = watched(tmp_path, built(Own), loader=data(2))
    assert seen.plans[0].schedules == ()

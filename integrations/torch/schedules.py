"""The learning-rate schedule driven to the end of the run, on a copy, before training starts."""

from __future__ import annotations

import copy
import dataclasses
import time
import types
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from trainvet.statistics import Schedule

SECONDS = 1.0
REACTIVE = (schedulers.ReduceLROnPlateau,)
PERIODIC = (schedulers.CosineAnnealingWarmRestarts, schedulers.CyclicLR)


@dataclasses.dataclass(frozen=True)
class Driven:
    """A scheduler and how the trainer steps it: every ``frequency`` of ``interval`` ("step" or "epoch").

    Where ``batches`` per epoch are given, a frequency in steps counts batches within the epoch, ``accumulation`` of them per optimizer step.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    reactive: bool = False
    batches: int = 0
    accumulation: int = 1

    def moves(self, step: int, steps_per_epoch: int) -> bool:
        """Is the scheduler stepped after optimizer step ``step`` (0-based)?"""
        frequency = max(1, self.frequency)
        if self.interval == "epoch":
            epoch, rest = divmod(step + 1, steps_per_epoch)
            return rest == 0 and epoch % frequency == 0
        if not self.batches:
            return (step + 1) % frequency == 0
        return min((step % steps_per_epoch + 1) * self.accumulation, self.batches) % frequency == 0


def simulate(driven: Driven, labels: Iterable[str], steps: int, steps_per_epoch: int, module: nn.Module | None = None) -> list[Schedule]:
    """The predicted learning rate of each parameter group at each of ``steps`` optimizer steps; empty where it cannot be simulated.

    The scheduler is copied with a stand-in for the optimizer, so no weights are copied; the work is capped in time.
    """
    labels = list(labels)
    scheduler = driven.scheduler
    kind = type(scheduler).__name__
    if driven.reactive or isinstance(scheduler, REACTIVE):
        return [Schedule(label, kind, driven.interval, np.zeros(0), reactive=True) for label in labels]
    steps_per_epoch = max(1, steps_per_epoch)
    every = max(1, driven.frequency) * (1 if driven.interval == "step" else steps_per_epoch)
    twin = _twin(scheduler, module)
    if twin is None or len(twin.optimizer.param_groups) != len(labels):
        return []
    curve = np.empty((steps, len(labels)))
    started = time.monotonic()
    groups = twin.optimizer.param_groups
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            if step and driven.moves(step - 1, steps_per_epoch):
                try:
                    twin.step()
                except Exception:  # e.g. OneCycleLR refuses to go past its end: the rate then stays, and the horizon says it
                    curve[step:] = [float(group["lr"]) for group in groups]
                    break
            curve[step] = [float(group["lr"]) for group in groups]
            if step % 64 == 0 and time.monotonic() - started > SECONDS:
                return []
    horizon = _horizon(scheduler)
    done = None if horizon is None else float(horizon * every)
    periodic = _any(scheduler, PERIODIC)
    return [Schedule(label, kind, driven.interval, curve[:, index], done, periodic) for index, label in enumerate(labels)]


class _StandIn(Optimizer):
    """Has the parameter groups' numbers and nothing else of the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self.param_groups = [{**copy.deepcopy(group), "params": []} for group in numbers]  # a rate may be a tensor that is changed in place
        self.defaults = dict(optimizer.defaults)
        self.state: Any = {}
        self._opt_called = True
        self.step = types.MethodType(_no_step, self)  # type: ignore[method-assign]


def _no_step(self: Optimizer, *args: Any) -> None:
    """Does nothing; torch's schedulers look at it to see whether the optimizer was stepped."""


_no_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _twin(scheduler: Any, module: nn.Module | None) -> Any:
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        return None
    memo: dict[int, Any] = {id(optimizer): _StandIn(optimizer)}
    if module is not None:
        memo |= {id(child): child for child in module.modules()}
        memo |= {id(parameter): parameter for parameter in module.parameters()}
        for attribute in ("_trainer", "trainer"):
            trainer = vars(module).get(attribute)
            if trainer is not None:
                memo[id(trainer)] = trainer
    try:
        return copy.deepcopy(scheduler, memo)
    except Exception:  # a schedule that cannot be copied cannot be simulated
        return None


def _any(scheduler: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(scheduler, kinds) or any(_any(inner, kinds) for inner in getattr(scheduler, "_schedulers", ()))


def _horizon(scheduler: Any) -> float | None:
    """Scheduler steps after which a decaying schedule is through; None for one without an end."""
    if isinstance(scheduler, schedulers.OneCycleLR):
        return float(scheduler.total_steps)
    if isinstance(scheduler, schedulers.CosineAnnealingLR):
        return float(scheduler.T_max)
    if isinstance(scheduler, schedulers.PolynomialLR):
        return float(scheduler.total_iters)
    if isinstance(scheduler, schedulers.LinearLR):
        return float(scheduler.total_iters) if scheduler.end_factor < scheduler.start_factor else None
    if isinstance(scheduler, schedulers.SequentialLR):
        last = _horizon(scheduler._schedulers[-1])
        return None if last is None else float(scheduler._milestones[-1]) + last
    return None

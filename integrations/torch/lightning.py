"""What only Lightning knows: the length of the run, its schedules, precision, scaler, and how to run a batch once more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainvet.integrations.torch.probe import Known
from trainvet.integrations.torch.schedules import Driven, simulate
from trainvet.statistics import Schedule


def scaler_of(trainer: Any) -> Any:
    """The GradScaler of mixed precision; None without one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def planned_steps(trainer: Any) -> int | None:
    """Optimizer-step attempts of the whole run; None where that is not known."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # data without length, or a strategy that cannot say
        return None
    if not math.isfinite(steps) or steps <= 0:
        return None
    return int(steps)


def known_facts(trainer: Any, module: Any) -> Known:
    """Everything the probe is told at the start."""
    planned = planned_steps(trainer)
    automatic = bool(module.automatic_optimization)
    accumulation = int(trainer.accumulate_grad_batches)
    per_epoch = trainer.num_training_batches
    steps_per_epoch = max(1, math.ceil(per_epoch / accumulation)) if math.isfinite(per_epoch) else 0
    schedules: list[Schedule] = []
    unobservable: dict[str, str] = {}
    if planned is not None and automatic and steps_per_epoch:
        several = len(trainer.optimizers) > 1
        for config in trainer.lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            stem = type(optimizer).__name__ if not several else f"{type(optimizer).__name__} {trainer.optimizers.index(optimizer)}"
            count = len(optimizer.param_groups)
            labels = [str(group.get("name") or (stem if count == 1 else f"{stem}/{index}")) for index, group in enumerate(optimizer.param_groups)]
            driven = Driven(config.scheduler, config.interval, config.frequency, bool(config.reduce_on_plateau))
            schedules += simulate(driven, labels, planned, steps_per_epoch, module)
    return Known(
        framework="lightning",
        planned_steps=planned,
        schedules=tuple(schedules) if trainer.global_step == 0 else (),
        precision=str(trainer.precision),
        clipping=float(trainer.gradient_clip_val or 0.0),
        accumulation=accumulation,
        manual_optimization=not automatic,
        resumed=trainer.global_step > 0,
        unobservable=unobservable,
    )


def last_checkpoint(trainer: Any, good: int | None) -> str | None:
    """The newest checkpoint that a ModelCheckpoint wrote and that is no later than the last good step."""
    import os

    newest: tuple[float, str] | None = None
    for callback in getattr(trainer, "checkpoint_callbacks", ()):
        paths = {getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""), *getattr(callback, "best_k_models", {})}
        for path in paths:
            if path and os.path.exists(path):
                newest = max(newest or (0.0, ""), (os.path.getmtime(path), str(path)))
    return newest[1] if newest else None


class Replay:
    """Runs the kept batch through ``training_step`` once more; nothing is logged and no optimizer moves.

    The RNG state of the start of the step is kept, so that dropout draws the same mask. Under manual optimisation a ``training_step`` steps
    optimizers by itself: there is no replay.
    """

    def __init__(self, module: Any, *, automatic: bool) -> None:
        self.module = module
        self.automatic = automatic
        self._kept: tuple[Any, int] | None = None
        self._rng: Tensor | None = None

    def keep(self, batch: Any, index: int) -> None:
        """A reference to the batch of the step that begins."""
        self._kept = (batch, index)
        if self.automatic:
            self._rng = torch.get_rng_state()

    def __call__(self) -> Tensor | None:
        """The loss of the kept batch, with its graph; None under manual optimisation."""
        if self._kept is None or not self.automatic:
            return None
        batch, index = self._kept
        with _muted(self.module):
            if self._rng is not None:
                torch.set_rng_state(self._rng)
            with self.module.trainer.precision_plugin.train_step_context():
                output = self.module.training_step(*_arguments(self.module, batch, index))
        loss = output.get("loss") if isinstance(output, dict) else output
        return loss if isinstance(loss, Tensor) else None


def _arguments(module: Any, batch: Any, index: int) -> list[Any]:
    import inspect

    names = list(inspect.signature(module.training_step).parameters)
    return [batch, index][: len(names)] if names else []


@contextlib.contextmanager
def _muted(module: Any) -> Iterator[None]:
    """``self.log`` and its kin do nothing meanwhile."""
    names = ("log", "log_dict", "print")
    for name in names:
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)

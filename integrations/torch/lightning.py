"""What only Lightning knows: the length of the run, its schedules, precision, scaler, and how to run a batch once more."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainvet.integrations.torch.plan import group_labels
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
    usual = type(module).lr_scheduler_step.__module__.startswith(("lightning.", "pytorch_lightning."))  # who overrides it steps differently
    if planned is not None and automatic and steps_per_epoch and usual:
        labels = {id(optimizer): names for optimizer, names in zip(trainer.optimizers, group_labels(trainer.optimizers), strict=True)}
        for config in trainer.lr_scheduler_configs:
            plateau = bool(config.reduce_on_plateau)
            driven = Driven(config.scheduler, config.interval, config.frequency, plateau, int(per_epoch), accumulation)
            schedules += simulate(driven, labels.get(id(config.scheduler.optimizer), ()), planned, steps_per_epoch, module)
    value = trainer.gradient_clip_val
    clip = float(value) if value is not None and value > 0 else None  # Lightning takes 0 for "off"
    by = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) or "norm") if clip is not None else ""
    return Known(
        framework="lightning",
        planned_steps=planned,
        schedules=tuple(schedules) if trainer.global_step == 0 else (),
        precision=str(trainer.precision),
        clipping=clip,
        clipping_by=by,
        clips_exactly=automatic and by in ("", "norm") and usual_clipping(trainer, module),
        accumulation=accumulation,
        manual_optimization=not automatic,
        resumed=trainer.global_step > 0,
        batches_per_epoch=int(per_epoch) if math.isfinite(per_epoch) else None,
        repeats_batches=bool(getattr(trainer, "overfit_batches", 0)) or bool(getattr(trainer, "fast_dev_run", False)),
        **data_facts(trainer),
        seeded="PL_GLOBAL_SEED" in os.environ,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        finetuning=any(named(callback, "BaseFinetuning") for callback in trainer.callbacks),
        processes=int(trainer.world_size),
        waits=True,
        unobservable=unobservable,
    )


def usual_clipping(trainer: Any, module: Any) -> bool:
    """Does the trainer clip by itself, over gradients that are whole on each process?"""
    own = type(module).configure_gradient_clipping.__module__.startswith(("lightning.", "pytorch_lightning."))
    whole = not any(part in type(trainer.strategy).__name__ for part in ("FSDP", "DeepSpeed", "ModelParallel", "XLA"))
    return own and whole


def data_facts(trainer: Any) -> dict[str, Any]:
    """What the sampler of a single DataLoader says: samples_per_epoch, shuffled, balanced. Nothing of what is not known."""
    loader = trainer.train_dataloader
    if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return {}
    sampler, found = loader.sampler, dict[str, Any]()
    try:
        samples = len(sampler) * (int(trainer.world_size) if hasattr(sampler, "num_replicas") else 1)  # type: ignore[arg-type]
        batches = trainer.num_training_batches
        if loader.batch_size and math.isfinite(batches) and batches < len(loader):
            samples = min(samples, int(batches) * loader.batch_size * int(trainer.world_size))
        found["samples_per_epoch"] = samples
    except Exception:  # a sampler without a length
        found.clear()
    kinds = torch.utils.data
    if isinstance(sampler, kinds.DistributedSampler):
        found["shuffled"] = bool(sampler.shuffle)
    elif isinstance(sampler, kinds.RandomSampler | kinds.SubsetRandomSampler | kinds.WeightedRandomSampler):
        found["shuffled"] = True
    elif type(sampler) is kinds.SequentialSampler and type(loader.batch_sampler) is kinds.BatchSampler:
        found["shuffled"] = False
    return found | ({"balanced": True} if isinstance(sampler, kinds.WeightedRandomSampler) else {})


def named(thing: Any, *names: str) -> bool:
    """Is it an instance of a class of that name? (``lightning`` and ``pytorch_lightning`` hold two of each.)"""
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def averaging(trainer: Any) -> bool:
    """Does a callback put averaged weights in place (EMA, SWA)?"""
    return any(named(callback, "WeightAveraging", "StochasticWeightAveraging") or "EMA" in type(callback).__name__ for callback in trainer.callbacks)


def fresh_metrics(trainer: Any) -> dict[str, float]:
    """The metrics of the evaluation or epoch that has just ended; not those that stand there from before."""
    connector = getattr(trainer, "_logger_connector", None)
    found = connector.metrics["callback"] if connector is not None and trainer._results is not None else trainer.callback_metrics
    return numbers(found)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of one element each, as floats. Reads the device."""
    found = {}
    for name, value in metrics.items():
        if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[str(name)] = float(value)
    return found


def last_checkpoint(trainer: Any, good: int | None) -> str | None:
    """The newest checkpoint of a ModelCheckpoint that holds nothing later than the step ``good``."""
    found: list[tuple[float, str]] = []
    for callback in getattr(trainer, "checkpoint_callbacks", ()):
        directory = getattr(callback, "dirpath", None)
        paths = [*(Path(directory).glob("*.ckpt") if directory else ()), getattr(callback, "best_model_path", "")]
        found += [(os.path.getmtime(path), str(path)) for path in paths if path and os.path.exists(path)]
    for _, path in sorted(found, reverse=True):
        steps = _steps_in(path)
        if steps is not None and steps <= (0 if good is None else good + 1):
            return path
    return None


def _steps_in(path: str) -> int | None:
    """How many steps a checkpoint holds, from the file (its tensors are not read) or its name; None where neither says."""
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # a directory, or objects of the user that are not to be loaded
        named = re.search(r"step=(\d+)", os.path.basename(path))
        return int(named[1]) if named else None


class Replay:
    """Runs the batches of a step through ``training_step`` once more; nothing is logged and no optimizer moves.

    The RNG state of the start of each batch is kept, so that dropout draws the same mask. Under manual optimisation a ``training_step`` steps
    optimizers by itself: there is no replay. ``depth`` is the number of steps whose batches are kept.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.depth = 1 if module.automatic_optimization else 0
        self._kept: deque[tuple[int, Any, int, Tensor]] = deque()

    def keep(self, batch: Any, index: int, step: int) -> None:
        """A reference to the batch that begins; it belongs to ``step``."""
        while self._kept and self._kept[0][0] <= step - self.depth:
            self._kept.popleft()
        if self.depth:
            self._kept.append((step, batch, index, torch.get_rng_state()))

    def runs(self, step: int) -> list[tuple[int, Callable[[], Tensor | None]]]:
        """For each batch of ``step`` that is kept, its index, and a call that returns its loss with the graph."""
        return [(index, partial(self._run, batch, index, rng)) for at, batch, index, rng in self._kept if at == step]

    def _run(self, batch: Any, index: int, rng: Tensor) -> Tensor | None:
        trainer = self.module.trainer
        with _muted(self.module, trainer), trainer.precision_plugin.train_step_context():
            torch.set_rng_state(rng)
            output = self.module.training_step(*_arguments(self.module, batch, index))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return loss if isinstance(loss, Tensor) else None


def _arguments(module: Any, batch: Any, index: int) -> list[Any]:
    """As Lightning calls it: with the index where ``training_step`` takes two arguments or any number."""
    parameters = list(inspect.signature(module.training_step).parameters.values())
    positional = [parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    some = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return [batch, index] if some or len(positional) >= 2 else [batch]


@contextlib.contextmanager
def _muted(module: Any, trainer: Any) -> Iterator[None]:
    """``self.log`` and its kin do nothing meanwhile, and loggers swallow what they are told."""
    names = ("log", "log_dict", "print")
    own = {name: module.__dict__[name] for name in names if name in module.__dict__}
    loggers = trainer.loggers
    for name in names:
        object.__setattr__(module, name, _nothing)
    trainer.loggers = [_dummy(trainer) for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in names:
            module.__dict__.pop(name, None)
        module.__dict__.update(own)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _dummy(trainer: Any) -> Any:
    """A logger that does nothing, from the trainer's own package."""
    package = type(trainer).__module__.removesuffix(".trainer.trainer")
    return importlib.import_module(f"{package}.loggers.logger").DummyLogger()

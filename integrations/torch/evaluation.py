"""The first batches of an evaluation: its inputs, the mode its modules are in, and what is left of initial running statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.data import named
from trainvet.integrations.torch.losses import KINDS, same
from trainvet.integrations.torch.modules import BATCH_NORM, Calls, Roster
from trainvet.integrations.torch.moments import Number, on_device, on_host, smaller, usable
from trainvet.statistics import Table, Vector

BATCHES = 8  # batches of an evaluation that are looked at
INPUT = frozenset({"mean", "std", "min", "max"})


@dataclasses.dataclass
class Pooled:
    """Mean, sum of squared deviations, extremes and sizes over several batches of one input."""

    elements: int = 0
    samples: int = 0
    mean: Number = 0.0
    spread: Number = 0.0
    low: Number = math.inf
    high: Number = -math.inf

    def add(self, tensor: Tensor) -> None:
        """One more batch, first dimension samples; stays on the device."""
        wide = tensor.detach() if tensor.dtype in (torch.float32, torch.float64) else tensor.detach().float()
        mean, spread, low, high, _ = (on_host if wide.device.type == "cpu" else on_device)(wide, "", INPUT)
        before, count = self.elements, wide.numel()
        self.elements += count
        self.samples += tensor.shape[0] if tensor.dim() else 1
        shift = mean - self.mean if before else 0.0
        self.spread = self.spread + spread + shift * shift * (before * count / self.elements)  # Chan, Golub and LeVeque
        self.mean = self.mean + shift * (count / self.elements) if before else mean
        self.low, self.high = smaller(low, self.low), -smaller(-high, -self.high)

    def columns(self) -> dict[str, float]:
        """On the host."""
        std = math.sqrt(max(0.0, float(self.spread)) / self.elements) if float(self.spread) == float(self.spread) else math.nan
        return {"mean": float(self.mean), "std": std, "min": float(self.low), "max": float(self.high), "count": float(self.samples)}


class _Batch(Look):
    """Inputs and labels of one batch; nothing else is measured."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__(paths, frozenset())
        self.labels: list[Tensor] = []

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Only loss functions are of interest: what they are given as target is no input."""
        if function in KINDS:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor):
                self.labels.append(target)


class Evaluation:
    """Looks at the first batches of an evaluation: ``start`` before a batch, ``pause`` after it, ``stop`` once the evaluation is over.

    To be made when the training starts: the running statistics of batch normalisations are then what they are initialised with, or loaded ones.
    After :data:`BATCHES` batches ``start`` does nothing until the next evaluation. Nothing of a batch is kept but numbers.
    """

    def __init__(self, root: nn.Module) -> None:
        self._batches = 0
        self._look: _Batch | None = None
        self._calls: Calls | None = None
        self._inputs: dict[str, Pooled] = {}
        self._loaded = {id(module) for module in root.modules() if isinstance(module, BATCH_NORM) and _loaded(module)}

    @property
    def done(self) -> bool:
        """Have enough batches of this evaluation been seen?"""
        return self._batches >= BATCHES

    def start(self, root: nn.Module, paths: Mapping[int, str] | None = None) -> None:
        """A batch begins. ``paths``: module id -> dotted path, where it is known."""
        if self.done or self._look is not None:
            return
        paths = {id(module): path for path, module in root.named_modules()} if paths is None else paths
        if self._calls is None:
            self._calls = Calls(Roster(root, paths))
        self._look = _Batch(paths)
        self._look.start()
        self._calls.start()

    def pause(self) -> None:
        """The batch is over: its inputs become numbers, and nothing of ours stands."""
        look, self._look = self._look, None
        if look is None or self._calls is None:
            return
        self._calls.pause()
        look.pause()
        try:
            usual = [tensor for tensor in look.inputs if tensor.dtype is not torch.bool]
            inputs = [tensor for tensor in usual if not any(same(tensor, label) for label in look.labels)]
            for name, tensor in named("input", inputs or usual).items():  # the names they have in training
                if tensor.numel() and usable(tensor) and not tensor.is_complex():
                    self._inputs.setdefault(name, Pooled()).add(tensor)
        finally:
            look.stop()
        self._batches += 1
        if look.error is not None:
            raise look.error

    def stop(self) -> dict[str, Table]:
        """The evaluation is over: validation_input and validation_module, without what was not seen. Reads the device."""
        try:
            self.pause()
            calls, inputs = self._calls, self._inputs
        finally:
            self._calls, self._inputs, self._batches = None, {}, 0
        tables: dict[str, Table] = {}
        if inputs:
            rows = [pooled.columns() for pooled in inputs.values()]
            tables["validation_input"] = Table(tuple(inputs), {key: np.array([row[key] for row in rows]) for key in rows[0]})
        if calls is not None and calls.error is not None:
            raise calls.error
        if calls is not None and calls.seen:
            called = sorted(calls.seen)
            training = np.array([float(calls.seen[row].training) for row in called])
            unsettled: Vector = np.array([0.0 if calls.seen[row].training else self._unsettled(calls.roster.modules[row]) for row in called])
            names = tuple(calls.roster.names[row] for row in called)
            tables["validation_module"] = Table(names, {"training": training, "unsettled": unsettled})
        return tables

    def _unsettled(self, module: nn.Module) -> float:
        if not isinstance(module, BATCH_NORM) or module.running_mean is None or module.num_batches_tracked is None or id(module) in self._loaded:
            return 0.0
        updates = int(module.num_batches_tracked)
        kept = 0.0 if module.momentum is None else 1.0 - module.momentum
        return float(kept**updates)


def _loaded(module: nn.Module) -> bool:
    """Were running statistics loaded that nobody counted? Weights from elsewhere may come without the counter."""
    if module.running_mean is None or module.running_var is None or is_lazy(module.running_mean):
        return False
    if module.num_batches_tracked is not None and int(module.num_batches_tracked):
        return False
    return bool((module.running_mean != 0).any()) or bool((module.running_var != 1).any())

"""Which modules a training forward calls and in which mode; the same, and the inputs, during an evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy

from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.losses import same
from trainvet.integrations.torch.moments import Number, on_device, on_host, smaller, usable
from trainvet.integrations.torch.plan import is_embedding
from trainvet.statistics import Subject, Table, Vector

BATCH_NORM = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
BATCHES = 8  # batches of an evaluation that are looked at
INPUT = frozenset({"mean", "std", "min", "max"})


def title(path: str, module: nn.Module) -> str:
    """The name of a module in tables: its dotted path, of the outermost one its type."""
    return path or type(module).__name__


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that hang on the module itself."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def reported(module: nn.Module) -> bool:
    """Does the module have a row: it owns parameters, or the mode decides what it does?"""
    return bool(own_parameters(module)) or isinstance(module, BATCH_NORM | DROPOUT) or is_embedding(module)


class Roster:
    """The modules of a plan that have a row in the table "module": names [M] and modules [M] in module order."""

    def __init__(self, root: nn.Module, paths: Mapping[int, str]) -> None:
        chosen = [(path, module) for path, module in root.named_modules() if id(module) in paths and reported(module)]
        self.modules = [module for _, module in chosen]
        self.paths = [path for path, _ in chosen]
        self.names = tuple(title(path, module) for path, module in chosen)
        self.index = {id(module): row for row, module in enumerate(self.modules)}

    def subjects(self, depth: Mapping[str, int]) -> Iterator[Subject]:
        """As the rules know them."""
        for name, path, module in zip(self.names, self.paths, self.modules, strict=True):
            own = own_parameters(module)
            dtype = str(own[0].dtype).removeprefix("torch.") if own else "float32"
            trainable = any(parameter.requires_grad for parameter in own)
            yield Subject(name, "module", path, type(module).__name__, depth.get(path, -1), (), dtype, trainable)


@dataclasses.dataclass
class Seen:
    """What the calls of one module in one step had in common; ``values`` and ``samples`` of the smallest batch it normalised."""

    called: int = 0
    training: bool = False
    values: int = 0
    samples: int = 0


class Calls:
    """Counts the calls of modules while it stands; ``autocast`` is the dtype of an autocast that some of them ran under.

    A recomputation of checkpointed parts does not count. An error of ours ends the counting and is kept in ``error``.
    """

    def __init__(self, roster: Roster, device: str = "cpu") -> None:
        self.roster = roster
        self.device = device
        self.seen: dict[int, Seen] = {}
        self.autocast = ""
        self.error: Exception | None = None
        self._handle: Any = None

    def start(self) -> None:
        """From now on calls count."""
        if self._handle is None and self.error is None:
            self._handle = register_module_forward_hook(self._after)

    def pause(self) -> None:
        """Calls do not count until the next start; nothing of ours is left."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        try:
            if not self.autocast and torch.is_autocast_enabled(self.device):
                self.autocast = str(torch.get_autocast_dtype(self.device)).removeprefix("torch.")
            row = self.roster.index.get(id(module))
            if row is not None:
                self._count(row, module, args)
        except Exception as error:
            self.error = error
            self.pause()

    def _count(self, row: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        seen = self.seen.setdefault(row, Seen())
        seen.called += 1
        seen.training = seen.training or module.training
        if not (isinstance(module, BATCH_NORM) and module.training and args and isinstance(args[0], Tensor) and args[0].dim() >= 2):
            return
        given = args[0]
        values, samples = given.numel() // max(1, given.shape[1]), given.shape[0]
        if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_available() and torch.distributed.is_initialized():
            values, samples = values * torch.distributed.get_world_size(), samples * torch.distributed.get_world_size()
        seen.values = min(values, seen.values) if seen.values else values
        seen.samples = min(samples, seen.samples) if seen.samples else samples

    def table(self) -> Table | None:
        """module.called, training, values and samples; None where no module was seen at all (the forward ran where hooks do not see it).

        Left out is a module that nobody called and whose parameters have a gradient nevertheless: they were used without it.
        """
        if not self.seen:
            return None
        rows = [row for row, module in enumerate(self.roster.modules) if row in self.seen or not _used(module)]
        found = [self.seen.get(row, Seen(training=self.roster.modules[row].training)) for row in rows]
        columns = {key: np.array([float(getattr(item, key)) for item in found]) for key in ("called", "training", "values", "samples")}
        return Table(tuple(self.roster.names[row] for row in rows), columns)


def _used(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in own_parameters(module) if not is_lazy(parameter))


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


class Evaluation:
    """Looks at the first batches of an evaluation: ``start`` before a batch, ``pause`` after it, ``stop`` once the evaluation is over.

    To be made when the training starts: the running statistics of batch normalisations are then what they are initialised with, or loaded ones.
    After :data:`BATCHES` batches ``start`` does nothing until the next evaluation. Nothing of a batch is kept but numbers.
    """

    def __init__(self, root: nn.Module) -> None:
        self._batches = 0
        self._look: Look | None = None
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
        self._look = Look(paths, frozenset())
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
            labels = [call.label for call in look.calls]
            inputs = [tensor for tensor in look.inputs if not any(same(tensor, label) for label in labels)]
            for index, tensor in enumerate(inputs):
                if tensor.dtype is not torch.bool and tensor.numel() and usable(tensor) and not tensor.is_complex():
                    self._inputs.setdefault("input" if len(inputs) == 1 else f"input.{index}", Pooled()).add(tensor)
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

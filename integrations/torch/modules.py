"""Which modules a training forward calls, how often, and in which mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy

from trainvet.integrations.torch.plan import is_embedding
from trainvet.statistics import Subject, Table

BATCH_NORM = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd


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
    """What the calls of one module in one step had in common; ``values`` and ``samples`` of the smallest batch it normalised; ``grad``: one of
    them ran with gradients on."""

    called: int = 0
    training: bool = False
    grad: bool = False
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
        seen.grad = seen.grad or torch.is_grad_enabled()
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

        Left out is a module that nobody called and whose parameters have a gradient nevertheless: they were used without it. So is one that only
        ran in evaluation mode and without gradients: a teacher is no part of the training forward.
        """
        if not self.seen:
            return None
        aside = {row for row, item in self.seen.items() if not (item.training or item.grad)}
        rows = [row for row, module in enumerate(self.roster.modules) if row not in aside and (row in self.seen or not _used(module))]
        found = [self.seen.get(row, Seen(training=self.roster.modules[row].training)) for row in rows]
        columns = {key: np.array([float(getattr(item, key)) for item in found]) for key in ("called", "training", "values", "samples")}
        return Table(tuple(self.roster.names[row] for row in rows), columns)


def _used(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in own_parameters(module) if not is_lazy(parameter))

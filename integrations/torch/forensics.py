"""Where a non-finite value was born: the kept batch is run once more, from clean weights, with every module watched, forward and backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from trainvet.integrations.torch.losses import tensors_in

FINITE, MINUS, PLUS, NAN = 0, 1, 2, 3


@dataclasses.dataclass
class Visit:
    """One module call of the replay: what went in, what came out, and what came back."""

    path: str
    kind: str
    order: int
    input_state: int
    low: float
    high: float
    output_state: int = FINITE
    output_gradient: int | None = None
    input_gradient: int | None = None


@dataclasses.dataclass(frozen=True)
class Origin:
    """The verdict: ``place`` is a module path or "loss"; ``direction`` "forward" or "backward"; the finite range that fed it."""

    place: str
    kind: str
    direction: str
    low: float
    high: float


@torch.no_grad()
def state(tensors: Iterator[tuple[str, Tensor]] | list[Tensor]) -> int:
    """The worst state over some tensors: finite, −Inf only (a mask), +Inf, or NaN. Reads the device."""
    worst = FINITE
    for item in tensors:
        tensor = item[1] if isinstance(item, tuple) else item
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.device.type == "meta":
            continue
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if values.layout is not torch.strided:
            values = values.coalesce().values()
        values = values if values.dtype in (torch.float32, torch.float64) else values.float()
        if bool(torch.isfinite(values).all()):
            continue
        if bool(torch.isnan(values).any()):
            return NAN
        worst = max(worst, PLUS if bool((values == torch.inf).any()) else MINUS)
    return worst


def locate(module: nn.Module, replay: Callable[[], Tensor | None]) -> Origin | None:
    """Run ``replay`` (a forward that returns the loss, or None) and name the first module that makes a non-finite value out of finite ones.

    None when the fault does not come back. Masks (−Inf from finite input) are legal; a NaN whose input held +Inf is traced back to the module
    that made the +Inf. Parameters' ``grad`` fields, buffers, RNG states and plain attributes of the modules are left as they were.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    watcher = _Watcher(paths)
    with undisturbed(module), watcher, torch.enable_grad():
        loss = replay()
        forward = watcher.forward_origin(loss)
        if forward is not None or loss is None or not loss.requires_grad:
            return forward
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        named = {id(parameter): name for name, parameter in module.named_parameters()}
        bad = {
            named[id(parameter)].rpartition(".")[0]
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None and state([gradient]) > FINITE
        }
        return watcher.backward_origin(bad)


class _Watcher:
    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.visits: list[Visit] = []
        self._open: list[Visit] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = self.paths.get(id(module))
        if path is None or torch._C._current_graph_task_id() != -1:
            return
        tensors = [tensor for _, tensor in tensors_in(args) if tensor.is_floating_point() and tensor.numel()]
        finite = [tensor.detach().float()[torch.isfinite(tensor.detach())] for tensor in tensors]
        finite = [values for values in finite if values.numel()]
        visit = Visit(
            path,
            type(module).__name__,
            len(self.visits) + len(self._open),
            state(tensors),
            min((float(values.min()) for values in finite), default=float("nan")),
            max((float(values.max()) for values in finite), default=float("nan")),
        )
        self._open.append(visit)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(_note(visit, "input_gradient"))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or torch._C._current_graph_task_id() != -1 or not self._open:
            return
        visit = self._open.pop()
        visit.output_state = state(tensors_in(output))
        self.visits.append(visit)
        for _, tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(_note(visit, "output_gradient"))

    def forward_origin(self, loss: Tensor | None) -> Origin | None:
        """The first module, in the order in which calls end, with a NaN (or a +Inf that became one) out of finite input."""
        if loss is not None and state([loss]) == FINITE:
            return None  # what does not reach the loss is no fault
        for visit in self.visits:
            if visit.output_state == NAN and visit.input_state != NAN:
                if visit.input_state == PLUS:
                    makers = [other for other in self.visits if other.output_state == PLUS and other.input_state in (FINITE, MINUS)]
                    visit = makers[0] if makers else visit
                return Origin(visit.path or visit.kind, visit.kind, "forward", visit.low, visit.high)
        for visit in self.visits:
            if visit.output_state == PLUS and visit.input_state in (FINITE, MINUS):
                return Origin(visit.path or visit.kind, visit.kind, "forward", visit.low, visit.high)
        if loss is None:
            return None
        last = self.visits[-1] if self.visits else None
        return Origin("loss", "loss", "forward", float("nan") if last is None else last.low, float("nan") if last is None else last.high)

    def backward_origin(self, bad_parameters: set[str]) -> Origin | None:
        """The last module whose output gradient is finite while what it passes back (or its own parameters' gradient) is not."""
        guilty = [
            visit
            for visit in self.visits
            if visit.output_gradient == FINITE and ((visit.input_gradient or FINITE) > FINITE or visit.path in bad_parameters)
        ]
        if guilty:
            innermost = max(guilty, key=lambda visit: (visit.order, visit.path.count(".")))
            return Origin(innermost.path or innermost.kind, innermost.kind, "backward", innermost.low, innermost.high)
        reached = [visit for visit in self.visits if visit.output_gradient not in (None, FINITE)]
        if not reached:
            return None
        last = max(reached, key=lambda visit: visit.order)
        return Origin("loss", "loss", "backward", last.low, last.high)


def _note(visit: Visit, field: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        setattr(visit, field, max(getattr(visit, field) or FINITE, state([gradient])))

    return hook


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """RNG states, buffers and plain attributes (also lists, dicts and tensors in them) of all modules are afterwards as before."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if buffer.device.type != "meta"]
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        plain = {key: _keep(value) for key, value in vars(child).items() if not isinstance(value, nn.Module) and not key.startswith("_parameters")}
        saved.append((vars(child), plain))
    try:
        yield
    finally:
        for live, plain in saved:
            for key in set(live) - set(plain) - {"_parameters"}:
                del live[key]
            for key, (value, content) in plain.items():
                live[key] = _restore(value, content)
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def _keep(value: Any) -> tuple[Any, Any]:
    if isinstance(value, list | dict | set | deque):
        return value, copy.copy(value)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf:
        return value, value.detach().clone()
    return value, None


def _restore(value: Any, content: Any) -> Any:
    if content is None:
        return value
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, deque):
        value.clear()
        value.extend(content)
    else:
        value.clear()
        value.update(content)
    return value

"""Where a non-finite value was born: the kept batch is run once more, from clean weights, with every module watched, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from trainvet.integrations.torch.activations import WITH_KWARGS
from trainvet.integrations.torch.losses import tensors_in
from trainvet.integrations.torch.moments import usable

FINITE, MINUS, PLUS, NAN = 0, 1, 2, 3
LARGEST = 1 << 24  # elements of a user's tensor or array up to which its content is kept over the replay


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


PRODUCTS = ("Linear", "LazyLinear", "Bilinear", "Conv", "LazyConv", "RNN", "LSTM", "GRU")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The verdict: ``place`` is a module path, a parameter, "input" or "loss"; ``direction`` "forward" or "backward"; the finite range that
    fed it. With the ``kind`` "input" it was there already when the module (or, for "input", the first one) was called."""

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
    that made the +Inf. Where the replay has no loss to give, the output of the outermost module stands for it, and the backward pass is not
    looked at. Parameters' ``grad`` fields, buffers, RNG states and plain attributes of the modules are left as they were.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    watcher = _Watcher(paths)
    with undisturbed(module), watcher, torch.enable_grad():
        loss = replay()
        forward = watcher.forward_origin(loss)
        if forward is not None:
            return _blame_parameter(module, forward)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if loss is None or not loss.requires_grad or not parameters:
            return None
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        named = {id(parameter): name for name, parameter in module.named_parameters()}
        bad = {
            named[id(parameter)].rpartition(".")[0]
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None and state([gradient]) > FINITE
        }
        return watcher.backward_origin(bad)


def _blame_parameter(module: nn.Module, origin: Origin) -> Origin:
    """The parameter itself, where the module made NaN because one of its own parameters was not finite."""
    own = module.get_submodule(origin.place) if origin.place in dict(module.named_modules()) else nn.Module()
    bad = next((name for name, parameter in own.named_parameters(recurse=False) if state([parameter]) > FINITE), None)
    return origin if bad is None else dataclasses.replace(origin, place=f"{origin.place}.{bad}", kind="parameter")


class _Watcher:
    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.visits: list[Visit] = []
        self._open: list[Visit] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after, with_kwargs=True)]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
            WITH_KWARGS.pop(handle.id, None)

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
        self._listen(tensors, visit, "input_gradient")

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or torch._C._current_graph_task_id() != -1 or not self._open:
            return
        visit = self._open.pop()
        if kwargs:  # a pre-hook on all modules is not shown them
            visit.input_state = max(visit.input_state, state(tensors_in(kwargs)))
        visit.output_state = state(tensors_in(output))
        self.visits.append(visit)
        self._listen([tensor for _, tensor in tensors_in(output)], visit, "output_gradient")

    def _listen(self, tensors: list[Tensor], visit: Visit, field: str) -> None:
        self._handles += [tensor.register_hook(_note(visit, field)) for tensor in tensors if tensor.requires_grad]

    def forward_origin(self, loss: Tensor | None) -> Origin | None:
        """The first module, in the order in which calls end, with a NaN (or a +Inf that became one) out of finite input."""
        at_the_end = self.visits[-1].output_state if self.visits else FINITE
        if (at_the_end if loss is None else state([loss])) == FINITE:
            return None  # what does not reach the loss is no fault
        for visit in self.visits:
            if visit.output_state == NAN and visit.input_state != NAN:
                visit = self._maker(visit)
                return Origin(visit.path or visit.kind, visit.kind, "forward", visit.low, visit.high)
        for visit in self.visits:
            if visit.output_state == PLUS and visit.input_state in (FINITE, MINUS):
                visit = self._maker(visit)
                return Origin(visit.path or visit.kind, visit.kind, "forward", visit.low, visit.high)
        through = [visit for visit in self.visits if visit.input_state in (PLUS, NAN) and visit.output_state in (PLUS, NAN)]
        entered = min(through, key=lambda visit: visit.order, default=None)
        if entered is not None:  # it came from code outside all modules, or with the batch
            return Origin("input" if entered.order == 0 else entered.path or entered.kind, "input", "forward", entered.low, entered.high)
        if loss is None:
            return None
        last = self.visits[-1] if self.visits else None
        return Origin("loss", "loss", "forward", float("nan") if last is None else last.low, float("nan") if last is None else last.high)

    def _maker(self, visit: Visit) -> Visit:
        """Who made the Inf that came in. −Inf counts where it meets a matrix: what is masked goes through a softmax or a maximum instead."""
        if visit.input_state == MINUS and not visit.kind.startswith(PRODUCTS):
            return visit
        before = {PLUS: (FINITE, MINUS), MINUS: (FINITE,)}.get(visit.input_state, ())
        return next((other for other in self.visits if other.output_state == visit.input_state and other.input_state in before), visit)

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
    saved = [(vars(child), _keep(vars(child), skip=("_parameters", "_modules"))) for child in module.modules()]
    try:
        yield
    finally:
        for live, kept in saved:
            _restore(live, kept)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def _keep(value: Any, depth: int = 0, skip: tuple[str, ...] = ()) -> Any:
    """What brings ``value`` back to its present content (containers down to some depth, arrays, tensors, generators); None for anything else."""
    if depth > 5:
        return None
    if isinstance(value, dict):
        return {key: (item, _keep(item, depth + 1)) for key, item in value.items() if key not in skip}, skip
    if isinstance(value, list | deque):
        return [(item, _keep(item, depth + 1)) for item in value]
    if isinstance(value, set):
        return set(value)
    if isinstance(value, Tensor):
        plain = value.is_leaf and not isinstance(value, nn.Parameter) and usable(value) and value.numel() <= LARGEST
        return value.detach().clone() if plain else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= LARGEST else None
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state() if isinstance(value, torch.Generator) else None


def _restore(value: Any, kept: Any) -> None:
    if kept is None:
        return
    if isinstance(value, dict):
        items, skip = kept
        for key in [key for key in value if key not in items and key not in skip]:
            del value[key]
        for key, (item, content) in items.items():
            value[key] = item
            _restore(item, content)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(item for item, _ in kept)
        for item, content in kept:
            _restore(item, content)
    elif isinstance(value, set):
        value.clear()
        value.update(kept)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(kept)
    elif isinstance(value, np.ndarray):
        value[...] = kept
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = kept
    elif isinstance(value, random.Random):
        value.setstate(kept)
    else:
        value.set_state(kept)

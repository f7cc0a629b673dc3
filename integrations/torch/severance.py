"""Traces one forward for operations that end the gradient: what was given a tensor that depends on parameters, and gave one that does not."""

from __future__ import annotations

import dataclasses
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from trainvet.integrations.torch.activations import WITH_KWARGS
from trainvet.integrations.torch.losses import tensors_in

CUTS = 512
# their derivative is 0 everywhere, although autograd keeps a path
FLAT = frozenset({"round", "round_", "floor", "floor_", "ceil", "ceil_", "trunc", "trunc_", "fix", "sign", "sign_", "sgn"})
# what leaves torch takes the gradient nowhere
READS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__array__"})
# they look at the form of what they are given, not at its values
FORM = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_tensor", "grad", "requires_grad_", "backward", "zero_",
})  # fmt: skip
SWITCHES = ("no_grad", "inference_mode", "set_grad_enabled")
SKIPPED = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "trainvet", "transformers", "accelerate")


@dataclasses.dataclass
class Cut:
    """One operation that ends the gradient, and the user's line. ``nodes`` and ``leaves``: autograd nodes of what it was given, and ids of leaves;
    ``parameters``: names of those that lie behind them. ``bit`` marks what was made of its result; ``outside``: that left torch."""

    operation: str
    module: str
    source: str
    bit: int
    nodes: list[Any] = dataclasses.field(default_factory=list)
    leaves: set[int] = dataclasses.field(default_factory=set)
    outside: bool = False
    parameters: set[str] = dataclasses.field(default_factory=set)


class Tracer:
    """Stands during one forward. What it found is asked for with the loss."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        """``paths``: module id -> dotted path."""
        self.error: Exception | None = None
        self._paths = paths
        self._stack: list[str] = []
        self._cuts: list[Cut] = []
        self._marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._left = 0  # marks of values that left torch
        self._block: Cut | None = None  # the no_grad block we are in
        self._handles: list[Any] = []
        self._mode = _Mode(self)
        self._entered = False

    def start(self) -> None:
        """The forward begins."""
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after, with_kwargs=True)]
        self._mode.__enter__()
        self._entered = True

    def pause(self) -> None:
        """The forward is over; nothing of ours stands."""
        for handle in self._handles:
            handle.remove()
            WITH_KWARGS.pop(handle.id, None)
        self._handles = []
        self._mode.tracer = None
        if self._entered and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._entered = False

    def cuts(self, loss: Tensor) -> list[Cut]:
        """What was cut on the way to ``loss``; where nothing inside torch led there, what left torch."""
        marks = self._mark(loss)
        inside = [cut for cut in self._cuts if cut.bit & marks]
        outside = [cut for cut in self._cuts if cut.outside or cut.bit & self._left]
        found = inside + [cut for cut in outside if not cut.bit & marks]
        if not found and loss.grad_fn is None:
            found = self._cuts[-1:]  # a loss that is a leaf was made anew of what came last
        for cut in found:
            cut.outside = not any(cut is other for other in inside)
        self._cuts, self._marks = [], {}
        return found

    # ---- what happens in the forward

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._stack.append(path)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None and path in self._stack:
            while self._stack.pop() != path:
                pass

    def given(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, Any]]:
        """Before the call: the tensors that carry a gradient, each with its node (None for a parameter)."""
        return [(tensor, tensor.grad_fn) for tensor in _tensors(args, kwargs) if tensor.requires_grad]

    def returned(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, given: list[tuple[Tensor, Any]]
    ) -> None:
        """After it."""
        name = _name(function)
        if name in FORM or torch._C._current_graph_task_id() != -1:
            return
        tensors, outputs = list(_tensors(args, kwargs)), list(_tensors((result,), {}))
        marks = 0
        for tensor in tensors:
            marks |= self._mark(tensor)
        grad = torch.is_grad_enabled()
        self._block = None if grad else self._block
        if name in READS:
            self._left |= marks
            if given:
                self._cut(name.strip("_"), given, grad).outside = True
        elif given and outputs and (name in FLAT or kwargs.get("rounding_mode") or not any(tensor.requires_grad for tensor in outputs)):
            marks |= self._cut(_shown(name, outputs), given, grad).bit
        if marks:
            for tensor in outputs or tensors[:1]:  # what returns nothing has written into its first argument
                self._marks[id(tensor)] = weakref.ref(tensor), marks | self._mark(tensor)

    def _cut(self, name: str, given: list[tuple[Tensor, Any]], grad: bool) -> Cut:
        cut = self._block
        if grad or cut is None:
            source = place(*(user_line() if grad else block_line()))
            cut = Cut(name if grad else "no_grad", self._stack[-1] if self._stack else "", source, 1 << len(self._cuts))
            if len(self._cuts) < CUTS:
                self._cuts.append(cut)
            self._block = None if grad else cut
        else:  # further into the block
            cut.module = _common(cut.module, self._stack[-1] if self._stack else "")
        cut.nodes += [node for _, node in given if node is not None]
        cut.leaves.update(id(tensor) for tensor, node in given if node is None)
        return cut

    def _mark(self, tensor: Tensor) -> int:
        kept = self._marks.get(id(tensor))
        return kept[1] if kept is not None and kept[0]() is tensor else 0


class _Mode(TorchFunctionMode):
    """Shows every torch function to the tracer; without one it only passes calls on."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer: Tracer | None = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        given: list[tuple[Tensor, Any]] = []
        if tracer is not None and tracer.error is None:
            try:
                with torch._C.DisableTorchFunction():
                    given = tracer.given(func, args, kwargs)
            except Exception as error:
                tracer.error = error
        result = func(*args, **kwargs)
        if tracer is not None and tracer.error is None:
            try:
                with torch._C.DisableTorchFunction():
                    tracer.returned(func, args, kwargs, result, given)
            except Exception as error:
                tracer.error = error
        return result


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (tensor for _, tensor in tensors_in(value))


def _common(left: str, right: str) -> str:
    """The module that two lie in."""
    parts = [one for one, other in zip(left.split("."), right.split("."), strict=False) if one == other]
    return ".".join(parts)


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else str(name)


def _shown(name: str, outputs: list[Tensor]) -> str:
    """What a user calls the operation."""
    if name in ("to", "type", "type_as") and not outputs[0].is_floating_point():
        return f"cast to {str(outputs[0].dtype).removeprefix('torch.')}"
    return name if name == "data" else name.strip("_")


def frames() -> Iterator[FrameType]:
    """The frames outside torch, the trainer and us, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__") or "").partition(".")[0] not in SKIPPED:
            yield frame
        frame = frame.f_back


def user_line() -> tuple[str, int]:
    """File and line of the user's code that runs now; empty where there is none."""
    return next(((frame.f_code.co_filename, frame.f_lineno) for frame in frames()), ("", 0))


def block_line() -> tuple[str, int]:
    """File and line of the statement that switched gradients off: in the innermost function of the user's that has one, else where it is."""
    for frame in frames():
        first, now = frame.f_code.co_firstlineno, frame.f_lineno
        lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : now]
        for offset in range(len(lines) - 1, -1, -1):
            if any(switch in lines[offset] for switch in SWITCHES):
                return frame.f_code.co_filename, first + offset
    return user_line()


def place(file: str, line: int) -> str:
    """ "src/model.py:12": from the working directory where the file lies in it, else the file's name alone."""
    if not file:
        return ""
    path = os.path.relpath(file) if os.path.isabs(file) and file.startswith(os.getcwd() + os.sep) else os.path.basename(file)
    return f"{path}:{line}"

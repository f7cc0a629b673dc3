"""Looking at one sampled forward: activations of modules and functions, inputs, the loss call, and the order of the modules.

Global module hooks and a function mode stand only while a sampled training forward runs, so other steps pay nothing. Numbers are reduced at once
(an in-place operation may overwrite a tensor right after) and stay on the device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_internals
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from trainvet.integrations.torch.by_hand import OPERATIONS
from trainvet.integrations.torch.handed import EMBEDDINGS, FACTORIES, PRODUCTS, Handed
from trainvet.integrations.torch.losses import KINDS, Call, same, tensors_in
from trainvet.integrations.torch.moments import SATURATED, Number, usable
from trainvet.integrations.torch.plan import removes_bias
from trainvet.integrations.torch.sites import LIMITS, Site, same_for_all
from trainvet.integrations.torch.sites import Windows as Windows

MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.GELU: "gelu", nn.SiLU: "silu",
    nn.LeakyReLU: "leaky_relu", nn.ELU: "elu", nn.SELU: "selu", nn.Softmax: "softmax", nn.Softplus: "softplus",
    nn.PReLU: "prelu",
}  # fmt: skip
FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", F.relu6: "relu", torch.relu: "relu", torch.relu_: "relu", Tensor.relu: "relu", Tensor.relu_: "relu",
    F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid", Tensor.sigmoid: "sigmoid", Tensor.sigmoid_: "sigmoid",
    F.tanh: "tanh", torch.tanh: "tanh", torch.tanh_: "tanh", Tensor.tanh: "tanh", Tensor.tanh_: "tanh",
    F.gelu: "gelu", F.silu: "silu", F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu", F.selu: "selu",
    F.selu_: "selu", torch.selu: "selu", torch.selu_: "selu", F.prelu: "prelu", torch.prelu: "prelu", Tensor.prelu: "prelu",
    F.softmax: "softmax", torch.softmax: "softmax", Tensor.softmax: "softmax",
}  # fmt: skip
BENT = frozenset(function for function, name in FUNCTIONS.items() if name in LIMITS and name != "relu")  # judged by their input
MATRIX_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum, torch.baddbmm})
PASSED_ON = frozenset({F.dropout, Tensor.to, Tensor.type_as, Tensor.contiguous})  # between the softmax of an attention and its product
FUSED = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward})
GATES = frozenset({*SATURATED, "softmax"})
CLAMPS = frozenset({torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_})
WATCHED = frozenset({*FUNCTIONS, *PRODUCTS, *CLAMPS, *KINDS, *FACTORIES, *OPERATIONS, *MATRIX_PRODUCTS, *PASSED_ON, *FUSED})
CHANNEL_SECOND = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
WITH_KWARGS: dict[int, bool] = getattr(module_internals, "_global_forward_hooks_with_kwargs", {})


class Look:
    """One sampled forward. ``start`` before it, ``pause`` when the backward begins, ``stop`` at the latest when the step is over.

    An error of ours must not reach the user's forward: it ends the look and is kept in ``error``. ``seconds`` is our time in the forward.
    """

    def __init__(self, paths: Mapping[int, str], want: frozenset[str]) -> None:
        """``paths``: module id -> dotted path; ``want``: the statistics that are due."""
        self.paths = paths
        self.error: Exception | None = None
        self.seconds = 0.0
        self._inside_activation = False
        self.want = frozenset(key.split(".", 1)[1] for key in want if key.startswith("activation."))
        self.sites: dict[str, Site] = {}
        self.order: dict[str, int] = {}
        self.inputs: list[Tensor] = []
        self.handed = Handed(want)
        self.calls: list[Call] = self.handed.calls
        self.entered: tuple[Any, ...] = ()
        self.before_norm: set[str] = set()
        self.fused_attention = False
        self._given: Tensor | None = None
        self._steady: dict[int, tuple[weakref.ref[Tensor], Number]] = {}
        self._stack: list[str] = []
        self._depth = 0
        self._made: set[int] = set()
        self._gates: dict[int, tuple[Tensor, Site]] = {}
        self._last: tuple[Tensor, str, nn.Module] | None = None
        self._counts: dict[tuple[str, str], int] = {}
        self._handles: list[Any] = []
        self._mode = _FunctionMode(self)
        self._entered = False

    def start(self, inside: nn.Module | None = None) -> None:
        """Hooks and mode on. ``inside``: the module whose call has begun already."""
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after, with_kwargs=True)]
        self._mode.__enter__()
        self._entered = True
        if inside is not None:
            self._before(inside, ())

    def pause(self) -> None:
        """The forward is over: take everything away that can be taken away now."""
        for handle in self._handles:
            handle.remove()
            WITH_KWARGS.pop(handle.id, None)  # torch forgets this one
        self._handles = []
        self._mode.look = None
        if self._entered and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._entered = False
        self._gates, self._last, self._given, self._steady = {}, None, None, {}
        self._stack = []
        self.handed.forget()

    def stop(self) -> None:
        """Nothing of ours is left; what was measured stays."""
        self.pause()
        self.inputs, self.calls, self.entered = [], [], ()
        self._made = set()

    # ---- hooks: never return anything, a returned value would replace the output

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = self.paths.get(id(module))
        if path is None or self.error is not None or torch._C._current_graph_task_id() != -1:
            return
        self.order.setdefault(path, self._depth)
        self._depth += 1
        if not self._stack:
            self.entered = args
        self._stack.append(path)
        self._inside_activation = type(module) in MODULES
        if isinstance(module, EMBEDDINGS):
            self._guarded(self.handed.entering, path, module, args)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or self.error is not None or torch._C._current_graph_task_id() != -1:
            return
        self._guarded(self._module, path, module, args, kwargs, output)

    def losing(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A loss function is about to be called."""
        if self.error is None and torch._C._current_graph_task_id() == -1:
            self._guarded(self.handed.before, function, args, kwargs)

    def bending(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], in_place: bool) -> None:
        """A function that is judged by its input is about to be called, and may overwrite it."""
        if self.error is None and torch._C._current_graph_task_id() == -1:
            self._guarded(self._keep, args, kwargs, in_place)

    def _keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], in_place: bool) -> None:
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or not usable(given) or "dead_share" not in self.want:
            return
        in_place = in_place or bool(kwargs.get("inplace")) or any(item is True for item in args[1:])
        self._given = given.detach().clone() if in_place else given.detach()

    def _guarded(self, look: Callable[..., None], *given: Any) -> None:
        started = time.perf_counter()
        try:
            with torch._C.DisableTorchFunction():  # our reductions are not part of the forward
                look(*given)
        except Exception as error:
            self._give_up(error)
        self.seconds += time.perf_counter() - started

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch function was called in the forward (not inside one of our own reductions)."""
        if function not in WATCHED or self.error is not None or torch._C._current_graph_task_id() != -1:
            return
        self._guarded(self._function, function, args, kwargs, result)

    def _give_up(self, error: Exception) -> None:
        self.error = error
        self.pause()

    def _module(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._inside_activation = False
        if path in self._stack:
            while self._stack.pop() != path:
                pass
        outputs = [output] if isinstance(output, Tensor) else [tensor for _, tensor in tensors_in(output)]
        outputs = [tensor for tensor in outputs if usable(tensor)]
        outermost = not self._stack
        if outermost or not all(tensor.requires_grad for tensor in outputs):
            owns = next(module.parameters(), None) is not None
            if owns and outermost:
                self._take_inputs(args, kwargs)
        else:
            owns = False
        self._made.update(tensor.data_ptr() for tensor in outputs if owns or tensor.requires_grad)
        if next(module.children(), None) is not None or not outputs:
            return
        self.handed.returned(path, module, outputs)
        if removes_bias(module) and self._last is not None and args and args[0] is self._last[0]:
            self.before_norm.add(f"{self._last[1]}.bias" if self._last[1] else "bias")
        function = MODULES.get(type(module), "")
        shown = next((tensor for tensor in outputs if tensor.is_floating_point()), None)
        if shown is not None:
            axis = self._axis(module, shown)
            order = self.order.setdefault(path, self._depth)
            site = self._site(path or type(module).__name__, path, type(module).__name__, function, order, shown)
            given = args[0] if args and isinstance(args[0], Tensor) else None
            if function in LIMITS and self._given is not None:
                given, self._given = self._given, None
            self._reduce(site, shown, axis, given, getattr(module, "dim", None))
            if function in GATES:
                self._gates[id(shown)] = shown, site
            self._last = (shown, path, module)

    def _function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if function in KINDS:
            prediction = self.handed.after(result)
            for tensor, site in self._gates.values():
                if prediction is not None and same(tensor, prediction):
                    site.role = "output"
            return
        if self.handed.other(function, args, kwargs, result):
            return
        if function in FUSED:
            self.fused_attention = True
            return
        if function in PASSED_ON:
            if args and id(args[0]) in self._gates and isinstance(result, Tensor):
                self._gates[id(result)] = result, self._gates[id(args[0])][1]
            return
        if function in PRODUCTS or function in MATRIX_PRODUCTS:
            self._multiplied(args, "gate" if function in PRODUCTS else "attention")
            return
        name = FUNCTIONS.get(function) or self._clamp(function, args, kwargs)
        if name is None or not isinstance(result, Tensor) or not result.is_floating_point() or not usable(result):
            return
        if self._inside_activation:  # its module hook reports it
            return
        path = self._stack[-1] if self._stack else ""
        count = self._counts.get((path, name), 0)
        self._counts[path, name] = count + 1
        label = f"{path}.{name}" if path else name
        site = self._site(label if count == 0 else f"{label}#{count}", path, "function", name, self._depth, result)
        self._depth += 1
        last = self._last[2] if self._last is not None else None
        given, self._given = args[0] if self._given is None and args else self._given, None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None) if name == "softmax" else None
        self._reduce(site, result, 1 if result.dim() > 2 and isinstance(last, CHANNEL_SECOND) else -1, given, dim)
        if name in GATES:
            self._gates[id(result)] = result, site

    def finish(self) -> None:
        """After the forward: a sigmoid, tanh or softmax that nothing follows is the model's output."""
        last = max(self.sites.values(), key=lambda site: site.depth, default=None)
        if last is not None and last.function in GATES and not last.role:
            last.role = "output"

    # ---- inside

    def _multiplied(self, args: tuple[Any, ...], role: str) -> None:
        """A product: a sigmoid, tanh or softmax in it weighs the other factor."""
        for argument in args:
            for factor in argument if isinstance(argument, list | tuple) else (argument,):
                _, site = self._gates.get(id(factor), (None, None))
                if site is not None and not site.role and (role == "gate" or site.function == "softmax"):
                    site.role = role

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for _, tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad or not usable(tensor) or not tensor.numel():
                continue
            if tensor.data_ptr() not in self._made and not any(same(tensor, other) for other in self.inputs):
                self.inputs.append(tensor)

    def _site(self, name: str, path: str, kind: str, function: str, depth: int, tensor: Tensor) -> Site:
        site = self.sites.get(name)
        if site is None:
            site = self.sites[name] = Site(name, path, kind, function, depth, tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        return site

    def _axis(self, module: nn.Module, tensor: Tensor) -> int:
        if tensor.dim() <= 2:
            return -1
        if isinstance(module, CHANNEL_SECOND) or tensor.dim() >= 4:
            return 1
        return 1 if self._last is not None and isinstance(self._last[2], CHANNEL_SECOND) else -1

    @staticmethod
    def _clamp(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        if function not in CLAMPS:
            return None
        low = kwargs.get("min", args[1] if len(args) > 1 else None)
        high = kwargs.get("max", args[2] if len(args) > 2 else None)
        return "relu" if high is None and isinstance(low, int | float) and low == 0 else None

    @torch.no_grad()
    def _reduce(self, site: Site, tensor: Tensor, axis: int, given: Any = None, dim: int | None = None) -> None:
        if not tensor.numel() or not self.want:
            return
        given = given if isinstance(given, Tensor) and usable(given) else None
        site.add(tensor, axis, self.want, given, dim)
        if "constant" in self.want:
            constant = self._constant(tensor, given)
            site.constant = constant if site.constant is None else site.constant * constant

    def _constant(self, tensor: Tensor, given: Tensor | None) -> Number:
        """Did all samples give the same? Not where they were given the same from outside, such as positions in a sequence."""
        constant = same_for_all(tensor)
        if given is None or (isinstance(constant, float) and not constant):
            return constant
        kept, steady = self._steady.get(id(given), (None, 0.0))
        steady = steady if kept is not None and kept() is given else 0.0 if given.requires_grad else same_for_all(given)
        self._steady[id(tensor)] = weakref.ref(tensor), constant * steady
        return constant * (1 - steady)

    @torch.no_grad()
    def columns(self, windows: Windows) -> tuple[tuple[str, ...], dict[str, list[Number]]]:
        """Site names in depth order and the wanted statistics, device scalars or host numbers."""
        sites = [site for site in sorted(self.sites.values(), key=lambda site: site.depth) if site.elements]
        batch = next((tensor.shape[0] for tensor in self.inputs if tensor.dim()), 0)
        cells = [site.cell(windows, batch) for site in sites]
        return tuple(site.name for site in sites), {key: [cell.get(key, 0.0) for cell in cells] for key in self.want} if cells else {}


class _FunctionMode(TorchFunctionMode):
    """Shows every torch function of the forward to the look; without a look it only passes calls on."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look: Look | None = look

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.look is not None and func in KINDS:
            self.look.losing(func, args, kwargs or {})
        if self.look is not None and func in BENT:
            self.look.bending(args, kwargs or {}, func.__name__.endswith("_"))
        result = func(*args, **(kwargs or {}))
        if self.look is not None:
            self.look.function(func, args, kwargs or {}, result)
        return result

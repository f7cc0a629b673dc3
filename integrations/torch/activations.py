"""Looking at one sampled forward: activations of modules and functions, inputs, the loss call, and the order of the modules.

Global module hooks and a function mode stand only while a sampled training forward runs, so other steps pay nothing. Numbers are reduced at once
(an in-place operation may overwrite a tensor right after) and stay on the device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_internals
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from trainvet.integrations.torch.handed import EMBEDDINGS, FACTORIES, PRODUCTS, Handed
from trainvet.integrations.torch.losses import KINDS, Call, same, tensors_in
from trainvet.integrations.torch.moments import SATURATED, Number, on_device, on_host, smaller, usable
from trainvet.integrations.torch.plan import removes_bias

MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.GELU: "gelu", nn.SiLU: "silu",
    nn.LeakyReLU: "leaky_relu", nn.ELU: "elu", nn.SELU: "selu", nn.Softmax: "softmax", nn.Softplus: "softplus",
}  # fmt: skip
FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", F.relu6: "relu", torch.relu: "relu", torch.relu_: "relu", Tensor.relu: "relu", Tensor.relu_: "relu",
    F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid", Tensor.sigmoid: "sigmoid", Tensor.sigmoid_: "sigmoid",
    F.tanh: "tanh", torch.tanh: "tanh", torch.tanh_: "tanh", Tensor.tanh: "tanh", Tensor.tanh_: "tanh",
}  # fmt: skip
CLAMPS = frozenset({torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_})
WATCHED = frozenset({*FUNCTIONS, *PRODUCTS, *CLAMPS, *KINDS, *FACTORIES})
CHANNEL_SECOND = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
WITH_KWARGS: dict[int, bool] = getattr(module_internals, "_global_forward_hooks_with_kwargs", {})
WINDOW_BATCHES, WINDOW_POSITIONS = 5, 1000


@dataclasses.dataclass
class Site:
    """One place where an activation is measured. Everything grows over the calls of one step: ``mean`` and ``spread`` (the sum of squared
    deviations from it) over ``elements``, ``sums`` the counts, ``low`` and ``high`` the extremes. Device scalars; on CPU host numbers."""

    name: str
    module: str
    module_type: str
    function: str
    depth: int
    shape: tuple[int, ...]
    role: str = ""
    elements: int = 0
    mean: Number = 0.0
    spread: Number = 0.0
    sums: dict[str, Number] = dataclasses.field(default_factory=dict)
    low: Number = math.inf
    high: Number = -math.inf
    unit_max: Tensor | None = None
    positions: int = 0


@dataclasses.dataclass
class Window:
    """The running per-unit maximum of a ReLU site over a window of samples."""

    high: Tensor
    batches: int = 0
    positions: int = 0


class Windows:
    """Per-site windows, kept between samples. One closes after 5 batches and 1,000 positions; then the next begins."""

    def __init__(self) -> None:
        self._open: dict[str, Window] = {}

    @torch.no_grad()
    def update(self, site: Site) -> tuple[Tensor, int, int]:
        """The share of units never above 0 in the present window (0-d, device), and its batches and positions so far."""
        assert site.unit_max is not None
        window = self._open.get(site.name)
        closed = window is not None and window.batches >= WINDOW_BATCHES and window.positions >= WINDOW_POSITIONS
        if window is None or closed or window.high.shape != site.unit_max.shape:
            window = self._open[site.name] = Window(torch.full_like(site.unit_max, -torch.inf))
        window.high = torch.fmax(window.high, site.unit_max)
        window.batches += 1
        window.positions += site.positions
        return (window.high <= 0).float().mean(), window.batches, window.positions


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
        self._gates, self._last = {}, None
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
        started = time.perf_counter()
        try:
            self._function(function, args, kwargs, result)
        except Exception as error:
            self._give_up(error)
        self.seconds += time.perf_counter() - started

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
            self._reduce(site, shown, axis)
            if function in SATURATED:
                self._gates[id(shown)] = shown, site
            self._last = (shown, path, module)

    def _function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if function in KINDS:
            prediction = self.handed.after(result)
            for tensor, site in self._gates.values():
                if prediction is not None and same(tensor, prediction):
                    site.role = "output"
            return
        if self.handed.other(function, args, result):
            return
        if function in PRODUCTS:
            for argument in args[:2]:
                if id(argument) in self._gates and not self._gates[id(argument)][1].role:
                    self._gates[id(argument)][1].role = "gate"
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
        self._reduce(site, result, 1 if result.dim() > 2 and isinstance(last, CHANNEL_SECOND) else -1)
        if name in SATURATED:
            self._gates[id(result)] = result, site

    def finish(self) -> None:
        """After the forward: a sigmoid or tanh that nothing follows is the model's output."""
        last = max(self.sites.values(), key=lambda site: site.depth, default=None)
        if last is not None and last.function in SATURATED and not last.role:
            last.role = "output"

    # ---- inside

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for _, tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad or not usable(tensor) or not tensor.numel():
                continue
            if tensor.data_ptr() not in self._made and not any(same(tensor, other) for other in self.inputs):
                self.inputs.append(tensor)

    def _site(self, name: str, path: str, kind: str, function: str, depth: int, tensor: Tensor) -> Site:
        site = self.sites.get(name)
        if site is None:
            site = self.sites[name] = Site(name, path, kind, function, depth, tuple(tensor.shape))
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

    def _reduce(self, site: Site, tensor: Tensor, axis: int) -> None:
        tensor = tensor.detach()
        if not tensor.numel() or not self.want:
            return
        wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        mean, spread, low, high, new = (on_host if wide.device.type == "cpu" else on_device)(wide, site.function, self.want)
        before, count = site.elements, wide.numel()
        site.elements += count
        if before:  # Chan, Golub and LeVeque: means and spreads of two parts put together
            spread = site.spread + spread + (mean - site.mean) * (mean - site.mean) * (before * count / site.elements)
            mean = site.mean + (mean - site.mean) * (count / site.elements)
            low, high = smaller(site.low, low), -smaller(-site.high, -high)
        site.mean, site.spread, site.low, site.high = mean, spread, low, high
        for key, value in new.items():
            site.sums[key] = site.sums[key] + value if key in site.sums else value
        if site.function == "relu" and "dead_share" in self.want and wide.dim():
            axis = axis % wide.dim()
            top = wide.amax(dim=[dim for dim in range(wide.dim()) if dim != axis]) if wide.dim() > 1 else wide
            same_units = site.unit_max is not None and site.unit_max.shape == top.shape
            site.unit_max = torch.fmax(site.unit_max, top) if same_units and site.unit_max is not None else top
            site.positions += wide.numel() // wide.shape[axis]

    @torch.no_grad()
    def columns(self, windows: Windows) -> tuple[tuple[str, ...], dict[str, list[Number]]]:
        """Site names in depth order and the wanted statistics, device scalars or host numbers."""
        sites = sorted(self.sites.values(), key=lambda site: site.depth)
        sites = [site for site in sites if site.elements]
        columns: dict[str, list[Number]] = {}
        for site in sites:
            count, sums = site.elements, site.sums
            variance = site.spread / count
            cell: dict[str, Number] = {"mean": site.mean, "std": variance**0.5, "rms": (variance + site.mean * site.mean) ** 0.5}
            cell |= {"min": site.low, "max": site.high, "abs_max": -smaller(site.low, -site.high)}
            cell |= {key: sums[key] for key in ("nan", "inf") if key in sums}
            if "zero" in sums:
                cell["zero_share"] = sums["zero"] / count
            cell["saturated_share"] = sums["saturated"] / count if "saturated" in sums else 0.0
            cell |= {"dead_share": 0.0, "batches": 0.0, "positions": 0.0}
            if site.unit_max is not None:
                cell["dead_share"], cell["batches"], cell["positions"] = windows.update(site)
            for key in self.want:
                columns.setdefault(key, []).append(cell.get(key, 0.0))
        return tuple(site.name for site in sites), columns


class _FunctionMode(TorchFunctionMode):
    """Shows every torch function of the forward to the look; without a look it only passes calls on."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look: Look | None = look

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.look is not None and func in KINDS:
            self.look.losing(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if self.look is not None:
            self.look.function(func, args, kwargs or {}, result)
        return result

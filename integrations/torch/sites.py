"""One place where an activation is measured: its numbers over the calls of a step, its units over a window of samples, its rows where it is a
softmax."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch.moments import Number, on_device, on_host, smaller
from trainvet.statistics import limits_of

WINDOW_BATCHES, WINDOW_POSITIONS = 5, 1000
# where a function is flat below: a unit whose input never rises above that is dead; of a ReLU the output tells it
LIMITS = {"relu": 0.0, "leaky_relu": 0.0, "prelu": 0.0, "gelu": -3.0, "elu": -3.0, "selu": -3.0, "silu": -6.0}


@dataclasses.dataclass
class Site:
    """Everything grows over the calls of one step: ``mean`` and ``spread`` (the sum of squared deviations from it) over ``elements``, ``sums``
    the counts, ``low`` and ``high`` the extremes; ``axis`` is that of a softmax. Device scalars; on CPU host numbers."""

    name: str
    module: str
    module_type: str
    function: str
    depth: int
    shape: tuple[int, ...]
    role: str = ""
    dtype: str = "float32"
    elements: int = 0
    mean: Number = 0.0
    spread: Number = 0.0
    sums: dict[str, Number] = dataclasses.field(default_factory=dict)
    low: Number = math.inf
    high: Number = -math.inf
    unit_max: Tensor | None = None
    positions: int = 0
    constant: Number | None = None
    peak: Number = 0.0
    axis: int | None = None

    def add(self, tensor: Tensor, axis: int, want: frozenset[str], given: Tensor | None = None, dim: int | None = None) -> None:
        """One more call. ``axis``: of the units; ``given``: what the function was given, as it was before the call; ``dim`` of a softmax."""
        wide = _wide(tensor)
        host = wide.device.type == "cpu"
        mean, spread, low, high, new = (on_host if host else on_device)(wide, self.function, want)
        before, count = self.elements, wide.numel()
        self.elements += count
        if before:  # Chan, Golub and LeVeque: means and spreads of two parts put together
            spread = self.spread + spread + (mean - self.mean) * (mean - self.mean) * (before * count / self.elements)
            mean = self.mean + (mean - self.mean) * (count / self.elements)
            low, high = smaller(self.low, low), -smaller(-self.high, -high)
        self.mean, self.spread, self.low, self.high = mean, spread, low, high
        new |= _more(wide, want)
        if self.function == "softmax" and dim is not None and wide.dim() > 1:
            self.axis, self.shape = dim % wide.dim(), tuple(wide.shape)
        if self.function == "softmax" and given is not None and want & {"entropy", "input_abs_max"}:
            rows, entropy, peak = softmax_rows(_wide(given), wide, -1 if dim is None else dim)
            new |= {"rows": rows, "entropy": entropy}
            self.peak = -smaller(-peak, -self.peak) if "rows" in self.sums else peak
        for key, value in new.items():
            self.sums[key] = self.sums[key] + value if key in self.sums else value
        source = wide if self.function == "relu" else None if given is None else _wide(given)
        if self.function in LIMITS and "dead_share" in want and source is not None and source.shape == wide.shape and wide.dim():
            self._units(source, axis % wide.dim())

    def _units(self, wide: Tensor, axis: int) -> None:
        top = wide.amax(dim=[dim for dim in range(wide.dim()) if dim != axis]) if wide.dim() > 1 else wide
        same_units = self.unit_max is not None and self.unit_max.shape == top.shape
        self.unit_max = torch.fmax(self.unit_max, top) if same_units and self.unit_max is not None else top.clone()
        self.positions += wide.numel() // wide.shape[axis]

    def cell(self, windows: Windows, batch: int) -> dict[str, Number]:
        """The statistics; ``batch``: samples in the batch, 0 where that is not known."""
        count, sums = self.elements, self.sums
        variance = self.spread / count
        cell: dict[str, Number] = {"mean": self.mean, "std": variance**0.5, "rms": (variance + self.mean * self.mean) ** 0.5}
        cell |= {"min": self.low, "max": self.high, "abs_max": -smaller(self.low, -self.high)}
        cell |= {key: sums[key] for key in ("nan", "inf") if key in sums}
        cell |= {key: value / count for key, value in sums.items() if key.startswith("share[")}
        for key, total in (("zero_share", "zero"), ("abs_mean", "abs"), ("saturated_share", "saturated")):
            cell[key] = sums[total] / count if total in sums else 0.0
        if "rows" in sums:
            rows = sums["rows"]
            cell["entropy"] = sums["entropy"] / (rows.clamp(min=1) if isinstance(rows, Tensor) else max(1.0, rows))
            cell["input_abs_max"] = self.peak
        if self.constant is not None and batch > 1 and self.shape and self.shape[0] % batch == 0:
            cell["constant"] = self.constant
        if self.axis == 0 and batch > 1:
            cell["batch_axis"] = float(self.shape[0] == batch and batch not in self.shape[1:])
        if self.unit_max is not None:
            cell["dead_share"], cell["batches"], cell["positions"] = windows.update(self)
        return cell


@dataclasses.dataclass
class Window:
    """The running per-unit maximum of a site over a window of samples."""

    high: Tensor
    batches: int = 0
    positions: int = 0


class Windows:
    """Per-site windows, kept between samples. One closes after 5 batches and 1,000 positions; then the next begins."""

    def __init__(self) -> None:
        self._open: dict[str, Window] = {}

    @torch.no_grad()
    def update(self, site: Site) -> tuple[Tensor, int, int]:
        """The share of units never above the limit in the present window (0-d, device), and its batches and positions so far."""
        assert site.unit_max is not None
        window = self._open.get(site.name)
        closed = window is not None and window.batches >= WINDOW_BATCHES and window.positions >= WINDOW_POSITIONS
        if window is None or closed or window.high.shape != site.unit_max.shape:
            window = self._open[site.name] = Window(torch.full_like(site.unit_max, -torch.inf))
        window.high = torch.fmax(window.high, site.unit_max)
        window.batches += 1
        window.positions += site.positions
        return (window.high <= LIMITS[site.function]).float().mean(), window.batches, window.positions


def softmax_rows(given: Tensor, result: Tensor, dim: int) -> tuple[Number, Number, Number]:
    """Rows with a choice, the sum of their entropies over the logarithm of the entries that are not exactly 0 (a mask, mostly), and the largest
    absolute finite value behind such an entry."""
    chosen = result != 0
    entries = chosen.sum(dim)
    entropy = -torch.xlogy(result, result).sum(dim)
    share = torch.where(entries > 1, entropy / entries.clamp(min=2).log(), 0.0)
    peak = torch.where(chosen & torch.isfinite(given), given.abs(), 0.0).amax() if given.shape == result.shape else result.new_zeros(())
    rows, total = (entries > 1).sum(), share.double().sum() if share.device.type == "cpu" else share.sum()
    return (float(rows), float(total), float(peak)) if result.device.type == "cpu" else (rows, total, peak)


def same_for_all(tensor: Tensor) -> Number:
    """1 where all samples (first dimension, two or more) are equal."""
    if tensor.dim() < 1 or tensor.shape[0] < 2 or not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return (tensor[1:] == tensor[:1]).all().to(torch.float32)
    return float(torch.equal(tensor[0], tensor[1]) and bool((tensor[1:] == tensor[:1]).all()))


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _more(wide: Tensor, want: frozenset[str]) -> dict[str, Number]:
    """The sum of absolute values, and counts of elements inside a watchpoint's range."""
    found: dict[str, Number] = {}
    host = wide.numpy() if wide.device.type == "cpu" else None
    if "abs_mean" in want:
        found["abs"] = float(np.abs(host).sum(dtype=np.float64)) if host is not None else wide.abs().sum()
    for key in want:
        limits = limits_of(key)
        if limits is not None:
            low, high = limits
            inside = np.count_nonzero((host >= low) & (host <= high)) if host is not None else ((wide >= low) & (wide <= high)).sum()
            found[key] = float(inside) if isinstance(inside, int) else inside
    return found

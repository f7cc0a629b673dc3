"""What a loss function is given as prediction, reduced at the moment of the call: rows, simplex, extremes; on the device, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch.moments import Number
from trainvet.statistics import limits_of

BLOCK = 1 << 22  # elements that are reduced at a time
SMALL = 1 << 14  # elements up to which the call costs more than the work
CLOSE = 1e-3


@torch.no_grad()
def measure(prediction: Tensor, axis: int | None, want: Iterable[str]) -> dict[str, Number]:
    """The wanted statistics of table "output": 0-d tensors on the device, host numbers in host memory.

    ``axis`` holds the classes, the first dimension (0 for a prediction without one) the samples; None: a row is all of one sample. Sums over
    blocks of samples are put together, so that no temporary grows with the batch.
    """
    want = frozenset(want)
    whole = prediction.detach()
    if whole.dim() == 0:
        whole = whole.reshape(1)
    if axis == 0:  # one sample without a batch dimension
        whole, axis = whole.unsqueeze(0), 1
    if not whole.numel():
        return {}
    samples = whole.shape[0]
    units = whole.numel() // samples if axis is None else whole.shape[axis]
    parts = _Parts(want, whole.numel(), units)
    step = max(1, BLOCK // max(1, whole.numel() // samples))
    first = whole[:1]
    for start in range(0, samples, step):
        block = whole[start : start + step]
        wide = block if block.dtype in (torch.float32, torch.float64) else block.float()
        parts.add(wide, wide.reshape(wide.shape[0], -1) if axis is None else wide.movedim(axis, -1).reshape(-1, units), block, first)
    found = parts.found(samples)
    if whole.device.type == "cpu":
        return {key: float(value) for key, value in found.items()}
    return found


class _Parts:
    """The sums of some blocks of one prediction."""

    def __init__(self, want: frozenset[str], elements: int, units: int) -> None:
        self.want, self.elements, self.units = want, elements, units
        self.cells: dict[str, Any] = {}
        self.seen = 0
        self.mean: Any = 0.0
        self.spread: Any = 0.0

    def add(self, wide: Tensor, rows: Tensor, block: Tensor, first: Tensor) -> None:
        """One block: wide [B, ...], the same as rows [R, units], and as it was given beside the first sample."""
        if wide.device.type == "cpu":
            self._plain_on_host(wide)
        else:
            self._plain(wide)
        want = self.want
        if wide.device.type == "cpu" and wide.numel() <= SMALL:
            self._rows_on_host(wide.numpy(), rows.numpy(), first.to(wide.dtype).numpy())
            return
        if "simplex_share" in want:
            inside = ((rows >= 0) & (rows <= 1)).all(1)
            self._sum("simplex", (inside & ((rows.sum(1) - 1).abs() <= CLOSE)).sum())
        if want & {"log_simplex_share", "log_normalizer"}:
            normalizer = torch.logsumexp(rows, 1)
            if "log_simplex_share" in want:
                self._sum("log_simplex", ((rows <= 0).all(1) & ((normalizer.exp() - 1).abs() <= CLOSE)).sum())
            if "log_normalizer" in want:
                self._sum("normalizer", normalizer.abs().sum())
        if "column_error" in want:
            self._sum("columns", wide.reshape(wide.shape[0], -1).sum(0))
        if "constant" in want:
            same = (block == first).all()
            self.cells["constant"] = same if "constant" not in self.cells else self.cells["constant"] & same

    def _rows_on_host(self, wide: Any, rows: Any, first: Any) -> None:
        want = self.want
        with np.errstate(all="ignore"):
            if "simplex_share" in want:
                self._sum("simplex", float(np.count_nonzero((rows.min(1) >= 0) & (rows.max(1) <= 1) & (np.abs(rows.sum(1) - 1) <= CLOSE))))
            if want & {"log_simplex_share", "log_normalizer"}:
                top = rows.max(1, keepdims=True)
                normalizer = (np.where(np.isfinite(top), np.log(np.exp(rows - top).sum(1, keepdims=True)), 0) + top)[:, 0]
                if "log_simplex_share" in want:
                    self._sum("log_simplex", float(np.count_nonzero((top[:, 0] <= 0) & (np.abs(np.exp(normalizer) - 1) <= CLOSE))))
                if "log_normalizer" in want:
                    self._sum("normalizer", float(np.abs(normalizer).sum()))
            if "column_error" in want:
                self._sum("columns", wide.reshape(len(wide), -1).sum(0))
            if "constant" in want:
                self.cells["constant"] = bool((wide == first).all()) and self.cells.get("constant", True)

    def _plain(self, wide: Tensor) -> None:
        want, count = self.want, wide.numel()
        if want & {"mean", "std", "rms"}:
            variance, mean = torch.var_mean(wide, correction=0)
            self._merge(count, mean, variance * count)
        if want & {"min", "max", "abs_max"}:
            low, high = torch.aminmax(wide)
            self.cells["min"] = torch.minimum(self.cells["min"], low) if "min" in self.cells else low
            self.cells["max"] = torch.maximum(self.cells["max"], high) if "max" in self.cells else high
        if "abs_mean" in want:
            self._sum("abs", wide.abs().sum())
        if "zero_share" in want:
            self._sum("zero", count - torch.count_nonzero(wide))
        if "nan" in want:
            self._sum("nan", torch.isnan(wide).sum())
        if "inf" in want:
            self._sum("inf", torch.isinf(wide).sum())
        for key in want:
            limits = limits_of(key)
            if limits is not None:
                self._sum(key, ((wide >= limits[0]) & (wide <= limits[1])).sum())

    def _plain_on_host(self, wide: Tensor) -> None:
        """The same through numpy, whose calls cost a fraction of torch's on small tensors."""
        want, values = self.want, wide.numpy()
        count = values.size
        with np.errstate(all="ignore"):
            if want & {"mean", "std", "rms"}:
                mean = float(np.mean(values, dtype=np.float64))
                self._merge(count, mean, float(np.var(values, dtype=np.float64)) * count)
            if want & {"min", "max", "abs_max"}:
                low, high = float(np.min(values)), float(np.max(values))
                self.cells["min"] = float(np.minimum(self.cells.get("min", math.inf), low))
                self.cells["max"] = float(np.maximum(self.cells.get("max", -math.inf), high))
            if "abs_mean" in want:
                self._sum("abs", float(np.sum(np.abs(values), dtype=np.float64)))
            if "zero_share" in want:
                self._sum("zero", float(count - np.count_nonzero(values)))
            if "nan" in want:
                self._sum("nan", float(np.count_nonzero(np.isnan(values))))
            if "inf" in want:
                self._sum("inf", float(np.count_nonzero(np.isinf(values))))
            for key in want:
                limits = limits_of(key)
                if limits is not None:
                    self._sum(key, float(np.count_nonzero((values >= limits[0]) & (values <= limits[1]))))

    def _merge(self, count: int, mean: Any, spread: Any) -> None:
        """Chan, Golub and LeVeque: means and sums of squared deviations of two parts put together."""
        total = self.seen + count
        if self.seen:
            apart = mean - self.mean
            spread = self.spread + spread + apart * apart * (self.seen * count / total)
            mean = self.mean + apart * (count / total)
        self.seen, self.mean, self.spread = total, mean, spread

    def _sum(self, key: str, value: Any) -> None:
        self.cells[key] = self.cells[key] + value if key in self.cells else value

    def found(self, samples: int) -> dict[str, Any]:
        """The statistics, over ``samples`` samples."""
        cells, rows = self.cells, self.elements // self.units
        found: dict[str, Any] = {"samples": float(rows), "units": float(self.units)}
        if self.seen:
            variance = self.spread / self.elements
            found |= {"mean": self.mean, "std": variance**0.5, "rms": (variance + self.mean * self.mean) ** 0.5}
        if "min" in cells:
            low, high = cells["min"], cells["max"]
            found |= {"min": low, "max": high, "abs_max": _larger(-low, high)}
        for key, name, count in (
            ("abs_mean", "abs", self.elements),
            ("zero_share", "zero", self.elements),
            ("nan", "nan", 1),
            ("inf", "inf", 1),
            ("simplex_share", "simplex", rows),
            ("log_simplex_share", "log_simplex", rows),
            ("log_normalizer", "normalizer", rows),
        ):
            if name in cells:
                found[key] = cells[name] / count
        if "columns" in cells:
            found["column_error"] = abs(cells["columns"] - 1).max()
        if "constant" in cells:
            found["constant"] = cells["constant"] * 1.0 if samples > 1 else 0.0
        for key in self.want:
            if limits_of(key) is not None and key in cells:
                found[key] = cells[key] / self.elements
        return {key: value for key, value in found.items() if key in self.want}


def _larger(left: Any, right: Any) -> Any:
    if isinstance(left, Tensor):
        return torch.maximum(left, right)
    return left if left != left or left > right else right

"""Inputs, labels and predictions of one sampled forward, as the tables "input", "label" and "output"; and what they have in common over the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch import kernels
from trainvet.integrations.torch.hashes import Hasher, Hashes, Pairs
from trainvet.integrations.torch.labels import Classes, ignored
from trainvet.integrations.torch.losses import Call, same
from trainvet.integrations.torch.moments import Number
from trainvet.integrations.torch.plan import MEASURABLE
from trainvet.statistics import Subject, Vector, limits_of

PLAIN = ("mean", "std", "min", "max", "abs_mean", "zero_share", "nan", "inf")
CHANNELS = frozenset({"channel_offset", "channel_std_min", "channel_std_max"})
Cells = dict[str, Number]
Place = tuple[str, str]


class Columns(Protocol):
    """Where columns go: an attempt, or what is told when there is none."""

    names: dict[str, tuple[str, ...]]
    constant: dict[tuple[str, str], Vector]
    parts: list[tuple[str, str, Tensor]]


@dataclasses.dataclass
class Seen:
    """What one look handed over: inputs and calls by their names, and the indices that embeddings were given."""

    inputs: dict[str, Tensor]
    calls: dict[str, Call]
    embeddings: Sequence[tuple[str, Any, Tensor]] = ()


class Data:
    """Names and measures data; keeps running class counts and the hashes of samples, in bounded memory."""

    def __init__(self) -> None:
        self.places: dict[Place, str] = {}
        self._hasher = Hasher()
        self._pairs = Pairs()
        self._classes: dict[str, Classes] = {}
        self._want: AbstractSet[str] = frozenset()
        self._wanted: tuple[frozenset[str], ...] = (frozenset(),) * 3

    # ---- names

    def name(self, calls: Sequence[Call]) -> dict[str, Call]:
        """The first call at each place (function and layer) by its number: "" where there is one place, ".0", ".1", … where there are several."""
        first: dict[Place, Call] = {}
        for call in calls:
            first.setdefault(place(call), call)
        if not self.places and first:
            self.places = {key: "" if len(first) == 1 else f".{index}" for index, key in enumerate(first)}
        for key in first:
            self.places.setdefault(key, f".{len(self.places)}")
        return {self.places[key]: call for key, call in first.items()}

    @staticmethod
    def names(number: str) -> tuple[str, str]:
        """Label and output of the call with a number."""
        return f"label{number}", f"output{number}"

    # ---- one sampled step

    @torch.no_grad()
    def sample(self, attempt: Columns, seen: Seen, want: AbstractSet[str]) -> None:
        """Put the tables of one look into ``attempt``."""
        if want != self._want:
            self._want, self._wanted = want, tuple(_of(target, want) for target in ("input", "label", "output"))
        inputs, labels, outputs = self._wanted
        hashes: dict[str, Hashes] = {}
        if inputs & {"fingerprint"} or labels & {"pairs", "contradictions"}:
            hashes = {name: self._hasher.samples(tensor) for name, tensor in seen.inputs.items() if tensor.dim()}
        if inputs:
            put(attempt, "input", {name: self._input(name, tensor, seen, hashes, inputs) for name, tensor in seen.inputs.items()})
        if labels:
            put(
                attempt,
                "label",
                {f"label{number}": self._label(number, call, hashes, labels) for number, call in seen.calls.items() if labelled(call)},
            )
        if outputs:
            put(attempt, "output", {f"output{number}": dict(call.numbers) for number, call in seen.calls.items()})

    @staticmethod
    def indices(attempt: Columns, found: Mapping[str, tuple[Number, Number]], want: AbstractSet[str]) -> None:
        """Smallest and largest index of each embedding, in the rows of table "module", which may hold other modules too."""
        if not found or want.isdisjoint(("module.index_min", "module.index_max")):
            return
        names = attempt.names.get("module") or tuple(found)
        rows: dict[str, Cells] = {name: {} for name in names}
        for path, (low, high) in found.items():
            if path in rows:
                rows[path] = {"index_min": low, "index_max": high}
        put(attempt, "module", rows, whole=True)

    def _input(self, name: str, tensor: Tensor, seen: Seen, hashes: Mapping[str, Hashes], want: AbstractSet[str]) -> Cells:
        cells = plain(tensor, want) | structure(tensor, want)
        if "padding_share" in want and not tensor.is_floating_point():
            padding = next((module.padding_idx for _, module, index in seen.embeddings if same(index, tensor)), None)
            if padding is not None:
                cells["padding_share"] = _number((tensor == padding).sum()) / tensor.numel()
        if "fingerprint" in want and name in hashes:
            cells["fingerprint"] = self._hasher.fingerprint(hashes[name])
        return cells

    def _label(self, number: str, call: Call, hashes: Mapping[str, Hashes], want: AbstractSet[str]) -> Cells:
        label = call.label
        cells = plain(label, want, ignored(call))
        cells |= self._classes.setdefault(number, Classes()).add(call, want)
        if want & {"pairs", "contradictions"} and label.dim() and label.numel() and number in ("", ".0"):
            count = label.shape[0]
            given = [value for value in hashes.values() if len(value) == count]
            if given and not call.target_made and all(value.device == label.device for value in given if isinstance(value, Tensor)):
                own = self._hasher.samples(label)
                if all(isinstance(value, Tensor) == isinstance(own, Tensor) for value in given):
                    cells["pairs"], cells["contradictions"] = self._pairs.add(given, own)
        return {key: value for key, value in cells.items() if key in want}


def named(target: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """ "input" where there is one, else "input.0", "input.1", …"""
    return {target if len(tensors) == 1 else f"{target}.{index}": tensor for index, tensor in enumerate(tensors)}


def place(call: Call) -> Place:
    """Where a loss function is called: which one, and on what layer's output."""
    return call.function, call.origin.layer


def labelled(call: Call) -> bool:
    """Has the call a label whose numbers can be measured?"""
    return bool(call.label.numel()) and call.label.layout is torch.strided and not call.label.is_complex()


def subjects(seen: Seen) -> list[Subject]:
    """Inputs, labels and outputs as the rules know them."""
    found = []
    for name, tensor in seen.inputs.items():
        fed = next((path for path, _, index in seen.embeddings if same(index, tensor)), None)
        found.append(_subject(name, "input", tensor.shape, tensor.dtype, "" if fed is None else fed, "" if fed is None else "embedding"))
    for number, call in seen.calls.items():
        if labelled(call):
            found.append(_subject(f"label{number}", "label", call.label.shape, call.label.dtype))
        output = _subject(f"output{number}", "output", call.shape, call.dtype, call.origin.layer)
        found.append(dataclasses.replace(output, function=call.origin.function))
    return found


def _subject(name: str, kind: str, shape: Sequence[int], dtype: torch.dtype, module: str = "", role: str = "") -> Subject:
    return Subject(name, kind, module, "", -1, tuple(shape), str(dtype).removeprefix("torch."), False, role=role)


# ---- kernels


def plain(tensor: Tensor, want: AbstractSet[str], without: Tensor | None = None) -> Cells:
    """Statistics over the elements, those ``without`` marks left out; host numbers in host memory, else 0-d tensors."""
    cells: Cells = {"count": float(tensor.shape[0]) if tensor.dim() else 1.0} if "count" in want else {}
    names = [name for name in want if name in PLAIN or name == "mean_square" or limits_of(name) is not None]
    if not names or not tensor.numel():
        return cells
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.device.type == "cpu":
        values = (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()
        if without is not None:
            values = values[~without.numpy()]
        return cells | (_host(values, names) if values.size else {})
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    if without is None:
        return cells | {name: wide.square().mean() if name == "mean_square" else kernels.statistic(name, wide) for name in names}
    return cells | _masked(wide, ~without, names)


def _host(values: Any, names: Sequence[str]) -> Cells:
    values = values.astype(np.float32) if values.dtype.kind == "b" else values
    cells: Cells = {}
    with np.errstate(all="ignore"):
        for name in names:
            limits = limits_of(name)
            if name == "mean":
                cells[name] = float(np.mean(values, dtype=np.float64))
            elif name == "std":
                cells[name] = float(np.std(values, dtype=np.float64))
            elif name == "abs_mean":
                cells[name] = float(np.mean(np.abs(values), dtype=np.float64))
            elif name == "mean_square":
                cells[name] = float(np.mean(np.square(values, dtype=np.float64)))
            elif name in ("min", "max"):
                cells[name] = float(values.min() if name == "min" else values.max())
            elif name == "zero_share":
                cells[name] = 1 - np.count_nonzero(values) / values.size
            elif limits is not None:
                cells[name] = np.count_nonzero((values >= limits[0]) & (values <= limits[1])) / values.size
            else:
                test = np.isnan if name == "nan" else np.isinf
                cells[name] = float(np.count_nonzero(test(values))) if values.dtype.kind == "f" else 0.0
    return cells


def _masked(wide: Tensor, keep: Tensor, names: Sequence[str]) -> Cells:
    count = keep.sum().clamp_min(1)
    mean = torch.where(keep, wide, 0.0).sum() / count
    measured: dict[str, Any] = {
        "mean": lambda: mean,
        "std": lambda: (torch.where(keep, wide - mean, 0.0).square().sum() / count).sqrt(),
        "min": lambda: torch.where(keep, wide, torch.inf).min(),
        "max": lambda: torch.where(keep, wide, -torch.inf).max(),
        "abs_mean": lambda: torch.where(keep, wide, 0.0).abs().sum() / count,
        "mean_square": lambda: torch.where(keep, wide, 0.0).square().sum() / count,
        "zero_share": lambda: (keep & (wide == 0)).sum() / count,
        "nan": lambda: (keep & torch.isnan(wide)).sum(),
        "inf": lambda: (keep & torch.isinf(wide)).sum(),
    }
    cells: Cells = {name: measured[name]() for name in names if name in measured}
    for name in names:
        limits = limits_of(name)
        if limits is not None:
            cells[name] = (keep & (wide >= limits[0]) & (wide <= limits[1])).sum() / count
    return cells


def structure(tensor: Tensor, want: AbstractSet[str]) -> Cells:
    """What the elements of an input are like: whole numbers, channels (dimension 1, the last of two), features that never vary."""
    cells: Cells = {}
    tensor = tensor.detach()
    if not tensor.numel() or tensor.is_complex():
        return cells
    floating = tensor.is_floating_point()
    wide = tensor if tensor.dtype in MEASURABLE[:2] or not floating else tensor.float()
    if "integers" in want:
        cells["integers"] = _number((wide == wide.floor()).all() * 1.0) if floating else 1.0
    if want & CHANNELS and floating:
        axis = 0 if wide.dim() < 2 else 1
        rest = [dim for dim in range(wide.dim()) if dim != axis] if wide.dim() > 1 else list(range(wide.dim()))
        spread, mean = torch.var_mean(wide, dim=rest, correction=0)
        spread = spread.sqrt()
        varies = wide.amax(rest) > wide.amin(rest)
        some = varies.any()
        cells["channel_offset"] = _number(torch.where(some, torch.where(varies, mean.abs() / spread, -torch.inf).max(), torch.nan))
        cells["channel_std_min"] = _number(torch.where(some, torch.where(varies, spread, torch.inf).min(), torch.nan))
        cells["channel_std_max"] = _number(torch.where(varies, spread, 0.0).max())
    if "constant_features" in want:
        if tensor.dim() and tensor.shape[0] > 1:
            first = tensor[:1]
            cells["constant_features"] = _number(((tensor == first).all(0) & (first[0] != 0)).sum())
        else:
            cells["constant_features"] = 0.0
    return {key: value for key, value in cells.items() if key in want}


def _number(value: Tensor) -> Number:
    return float(value) if value.device.type == "cpu" else value


def _of(target: str, want: AbstractSet[str]) -> frozenset[str]:
    return frozenset(key.partition(".")[2] for key in want if key.startswith(f"{target}."))


def put(attempt: Columns, target: str, rows: Mapping[str, Cells], whole: bool = False) -> None:
    """Rows of a table into ``attempt``: NaN where a row lacks what another one has; what no row has stays absent. ``whole``: empty rows too."""
    rows = {name: cells for name, cells in rows.items() if cells or whole}
    if not rows:
        return
    attempt.names[target] = tuple(rows)
    for statistic in dict.fromkeys(key for cells in rows.values() for key in cells):
        column = [cells.get(statistic, np.nan) for cells in rows.values()]
        home = next((cell.device for cell in column if isinstance(cell, Tensor) and cell.device.type != "cpu"), None)
        if home is None:
            attempt.constant[target, statistic] = np.array(column, dtype=np.float64)
            continue
        wide = [torch.as_tensor(cell, dtype=torch.float32, device=home).reshape(()) for cell in column]
        attempt.parts.append((target, statistic, torch.stack(wide)))

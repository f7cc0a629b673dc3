"""One packed vector per sampled step: what is put where in the graph, and how the host reads it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainvet.statistics import Subject, Vector

# statistic wanted -> raw numbers that are reduced on the device for it
NEEDS: dict[str, tuple[str, ...]] = {
    "norm": ("square",), "rms": ("square",), "mean": ("sum",), "abs_mean": ("abs_sum",), "std": ("variance",), "abs_max": ("min", "max"),
    "min": ("min",), "max": ("max",), "zero_share": ("nonzero",), "mean_square": ("square",), "identical_rows": ("identical",),
    "saturated_share": ("saturated",), "dead_share": ("units",), "batches": ("units",), "positions": ("units",), "nan": ("nan",), "inf": ("inf",),
    "nonfinite": ("nonfinite",), "present": (), "count": (), "ratio": ("square", "before"), "unchanged": ("unchanged",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where the raw number ``raw`` of ``target`` stands in the vector: one element per name, or ``width`` elements for one name."""

    target: str
    raw: str
    names: tuple[str, ...]
    start: int
    width: int


class Layout:
    """Collects tensors while a step is traced (or run eagerly), then knows how to cut the packed vector up.

    ``counts`` holds the elements of each subject where they are known when tracing; others come as the raw number "count".
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.tensors: list[Any] = []
        self.size = 0
        self.counts: dict[tuple[str, str], float] = {}
        self.subjects: dict[tuple[str, str], Subject] = {}

    def add(self, target: str, raw: str, cells: Mapping[str, Any], stack: Any) -> None:
        """One number per name; ``stack`` makes a vector of scalars."""
        if cells:
            self.slots.append(Slot(target, raw, tuple(cells), self.size, len(cells)))
            self.tensors.append(stack(list(cells.values())))
            self.size += len(cells)

    def add_vector(self, target: str, raw: str, name: str, tensor: Any, width: int) -> None:
        """``width`` numbers for one name."""
        self.slots.append(Slot(target, raw, (name,), self.size, width))
        self.tensors.append(tensor)
        self.size += width

    def seal(self) -> Layout:
        """Drop the tensors, which belong to a graph; what is left describes the vector."""
        self.tensors = []
        return self


class Reading:
    """One packed vector, cut up: ``raw[target][name]`` is {raw name: number}; ``units[name]`` the per-unit maxima of a layer."""

    def __init__(self, layout: Layout, vector: Vector) -> None:
        self.raw: dict[str, dict[str, dict[str, float]]] = {}
        self.units: dict[str, Vector] = {}
        for slot in layout.slots:
            part = vector[slot.start : slot.start + slot.width]
            if slot.raw == "units":
                self.units[slot.names[0]] = part
                continue
            rows = self.raw.setdefault(slot.target, {})
            for name, value in zip(slot.names, part.tolist(), strict=True):
                rows.setdefault(name, {})[slot.raw] = value
        for (target, name), count in layout.counts.items():
            self.raw.setdefault(target, {}).setdefault(name, {}).setdefault("count", count)

    def number(self, target: str, name: str, default: float = 0.0) -> float:
        """The raw number "value" of a subject."""
        return self.raw.get(target, {}).get(name, {}).get("value", default)


def needed(want: Iterable[str], target: str) -> frozenset[str]:
    """The raw numbers to reduce for the statistics of ``target`` in ``want``."""
    names = [key.split(".", 1)[1] for key in want if key.startswith(f"{target}.")]
    return frozenset(raw for name in names for raw in NEEDS[name])


def columns(rows: Mapping[str, Mapping[str, float]], want: frozenset[str], target: str) -> dict[str, Vector]:
    """Statistics of all subjects of a target (float64 [S]) from their raw numbers. A subject without a gradient has 0 everywhere."""
    found = {}
    for key in sorted(want):
        owner, name = key.split(".", 1)
        if owner == target and name in FORMULAS:
            found[name] = np.array([FORMULAS[name](row) for row in rows.values()], dtype=np.float64)
    return found


def _share(row: Mapping[str, float], raw: str, of: str = "count") -> float:
    count = row.get(of, row.get("count", 0.0))  # "valid": elements that are not masked
    return row.get(raw, 0.0) / count if count > 0 else 0.0


def _root(value: float) -> float:
    return float(np.sqrt(value)) if value >= 0 or np.isnan(value) else 0.0


def _ratio(row: Mapping[str, float]) -> float:
    change, size = _root(row.get("square", 0.0)), _root(row.get("before", 0.0))
    if size == 0:
        return np.inf if change > 0 else 0.0
    return change / size


def _norm(row: Mapping[str, float]) -> float:
    exact = row.get("exact", -1.0)  # only taken where the sum of squares left float32
    return _root(row.get("square", 0.0)) if exact == -1.0 else exact


def _abs_max(row: Mapping[str, float]) -> float:
    low, high = row.get("min", 0.0), row.get("max", 0.0)
    return float(np.maximum(abs(low), abs(high)))  # keeps NaN


FORMULAS: dict[str, Any] = {
    "norm": _norm,
    "rms": lambda row: _norm(row) / np.sqrt(row["count"]) if row.get("count", 0.0) > 0 else 0.0,
    "mean": lambda row: _share(row, "sum"),
    "abs_mean": lambda row: _share(row, "abs_sum"),
    "mean_square": lambda row: _share(row, "square"),
    "std": lambda row: _root(row.get("variance", 0.0)),
    "abs_max": _abs_max,
    "min": lambda row: row.get("min", 0.0),
    "max": lambda row: row.get("max", 0.0),
    "zero_share": lambda row: 1.0 - _share(row, "nonzero", "valid") if row.get("count", 0.0) > 0 else 0.0,
    "saturated_share": lambda row: _share(row, "saturated", "valid"),
    "nan": lambda row: row.get("nan", 0.0),
    "inf": lambda row: row.get("inf", 0.0),
    "nonfinite": lambda row: row.get("nonfinite", 0.0),
    "present": lambda row: row.get("present", 1.0),
    "count": lambda row: row.get("samples", 0.0),
    "identical_rows": lambda row: row.get("identical", 0.0),
    "ratio": _ratio,
    "unchanged": lambda row: row.get("unchanged", 0.0),
    "dead_share": lambda row: row.get("dead_share", 0.0),
    "batches": lambda row: row.get("batches", 0.0),
    "positions": lambda row: row.get("positions", 0.0),
}

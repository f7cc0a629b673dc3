"""One packed vector per measured step: what is put where in the graph, and how the host makes tables of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from trainvet.statistics import Subject, Table, Vector, limits_of

# statistic wanted -> raw numbers that are reduced on the device for it
NEEDS: dict[str, tuple[str, ...]] = {
    "norm": ("square",), "rms": ("square",), "mean": ("sum",), "abs_mean": ("abs_sum",), "std": ("variance",), "abs_max": ("min", "max"),
    "min": ("min",), "max": ("max",), "zero_share": ("nonzero",), "mean_square": ("square",), "identical_rows": ("identical",),
    "saturated_share": ("saturated",), "dead_share": ("units",), "batches": ("units",), "positions": ("units",), "nan": ("nan",), "inf": ("inf",),
    "nonfinite": ("nonfinite",), "present": (), "count": (), "ratio": ("square", "before"), "unchanged": ("largest",), "close": ("close",),
    "abs_mean_ratio": ("abs_change", "abs_before"), "swallowed_share": ("swallowed",), "underflow_share": ("underflow", "nonzero"),
    "constant": ("constant",), "entropy": ("entropy",), "input_abs_max": ("input_abs_max",), "changed": ("square", "sum"),
    "batch_axis": ("batch_axis",),
}  # fmt: skip
# what a raw number is where it was not reduced: a subject without a gradient has 0 everywhere
ABSENT = {
    "exact": -1.0,
    "present": 1.0,
    "entropy": np.nan,
    "input_abs_max": np.nan,
    "underflow": np.nan,
    "swallowed": np.nan,
    "batch_axis": np.nan,
} | dict.fromkeys(("values", "index_min", "index_max"), np.nan)
Raw = dict[str, Vector]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where the raw number ``raw`` of ``target`` stands in the vector: one element per name, or ``width`` elements for one name."""

    target: str
    raw: str
    names: tuple[str, ...]
    start: int
    width: int


@dataclasses.dataclass(frozen=True)
class Order:
    """The names of a target in another order, and where each of them stands in its columns."""

    names: tuple[str, ...]
    index: np.ndarray[Any, np.dtype[np.int64]]


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
        self.names: dict[str, tuple[str, ...]] = {}
        self.places: list[np.ndarray[Any, np.dtype[np.int64]] | None] = []
        self.sizes: dict[str, Vector] = {}

    def add(self, target: str, raw: str, cells: Mapping[str, Any], stack: Callable[[list[Any]], Any]) -> None:
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

    def by(self, target: str, depth: Mapping[str, int]) -> Order:
        """The names of a target by their ``depth``, unknown ones last."""
        names = self.names.get(target, ())
        index = np.array(sorted(range(len(names)), key=lambda place: depth.get(names[place], len(depth))), dtype=np.int64)
        return Order(tuple(names[place] for place in index), index)

    def seal(self) -> Layout:
        """Drop the tensors, which belong to a graph, and work out where each slot's numbers go in its target's columns."""
        self.tensors = []
        order: dict[str, dict[str, int]] = {}
        for slot in self.slots:
            place = order.setdefault(slot.target, {})
            for name in slot.names:
                place.setdefault(name, len(place))
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal lists of names are one object, so that rules can compare them at no cost
        self.names = {target: shared.setdefault(tuple(place), tuple(place)) for target, place in order.items()}
        self.places = [
            None if slot.names == self.names[slot.target] else np.array([order[slot.target][name] for name in slot.names], dtype=np.int64)
            for slot in self.slots
        ]
        self.sizes = {target: np.array([self.counts.get((target, name), 0.0) for name in names]) for target, names in self.names.items()}
        return self


class Reading:
    """One packed vector, cut up: ``raw[target]`` is {raw number: float64 [names of the target]}; ``units[name]`` the per-unit maxima of a layer."""

    def __init__(self, layout: Layout, vector: Vector) -> None:
        self.layout = layout
        self.raw: dict[str, Raw] = {}
        self.units: dict[str, Vector] = {}
        for slot, place in zip(layout.slots, layout.places, strict=True):
            part = vector[slot.start : slot.start + slot.width]
            if slot.raw == "units":
                self.units[slot.names[0]] = part
                continue
            columns = self.raw.setdefault(slot.target, {})
            if place is not None:
                whole = np.full(len(layout.names[slot.target]), ABSENT.get(slot.raw, 0.0))
                whole[place] = part
                part = whole
            columns[slot.raw] = part
        for target, columns in self.raw.items():
            sizes = layout.sizes[target]
            columns["count"] = np.where(columns["count"] > 0, columns["count"], sizes) if "count" in columns else sizes

    def number(self, target: str, name: str, default: float = 0.0) -> float:
        """The raw number "value" of a subject."""
        names = self.layout.names.get(target, ())
        return float(self.raw[target]["value"][names.index(name)]) if name in names else default

    def set(self, target: str, raw: str, values: Mapping[str, float]) -> None:
        """Numbers that the host works out, 0 where there is none."""
        self.raw[target][raw] = np.array([values.get(name, 0.0) for name in self.layout.names[target]])

    def table(self, target: str, statistics: Iterable[str], order: Order | None = None) -> Table | None:
        """The statistics ("norm", "mean", …) of all subjects of a target, in another ``order`` if one is given; None where nothing was measured."""
        raw = self.raw.get(target)
        formulas = {name: _formula(name) for name in statistics}
        filled = {name: formula(raw) for name, formula in formulas.items() if formula and not _unmeasured(name, raw)} if raw else {}
        if not filled or raw is None:
            return None
        if target == "gradient" and "identical_rows" in filled:  # equal, and not all of them zero
            filled["identical_rows"] = filled["identical_rows"] * (_norm(raw) != 0)
        if order is not None:
            return Table(order.names, {name: column[order.index] for name, column in filled.items()})
        return Table(self.layout.names[target], filled)


def needed(want: Iterable[str], target: str) -> frozenset[str]:
    """The raw numbers to reduce for the statistics of ``target`` in ``want``."""
    return frozenset(raw for key in want if key.startswith(f"{target}.") for raw in _needs(key.split(".", 1)[1]))


def _needs(statistic: str) -> tuple[str, ...]:
    """The share of elements in a range is counted under its own name."""
    return (statistic,) if limits_of(statistic) is not None else NEEDS.get(statistic, ())


def _unmeasured(statistic: str, raw: Raw) -> bool:
    """A number that only some layers or precisions have, and here none of them."""
    return any(name not in raw and (np.isnan(ABSENT.get(name, 0.0)) or limits_of(name) is not None) for name in _needs(statistic))


def _get(raw: Raw, name: str) -> Vector:
    found = raw.get(name)
    return np.full(len(raw["count"]), ABSENT.get(name, 0.0)) if found is None else found


def _share(name: str) -> Callable[[Raw], Vector]:
    def share(raw: Raw) -> Vector:
        return np.asarray(_get(raw, name) / np.maximum(raw["count"], 1.0))

    return share


def _valid_share(name: str, rest: bool = False) -> Callable[[Raw], Vector]:
    """A share of the elements that are not masked."""

    def share(raw: Raw) -> Vector:
        valid = np.where(_get(raw, "valid") > 0, _get(raw, "valid"), raw["count"])
        found = _get(raw, name) / np.maximum(valid, 1.0)
        return np.asarray(np.where(valid > 0, 1.0 - found, 0.0) if rest else found)

    return share


def _norm(raw: Raw) -> Vector:
    exact = _get(raw, "exact")  # only taken where the sum of squares left float32
    return np.asarray(np.where(exact == -1.0, np.sqrt(2.0 * np.maximum(_get(raw, "square"), 0.0)), exact))


def _rms(raw: Raw) -> Vector:
    return np.asarray(_norm(raw) / np.sqrt(np.maximum(raw["count"], 1.0)))


def _ratio(raw: Raw) -> Vector:
    change, size = np.sqrt(_get(raw, "square")), np.sqrt(_get(raw, "before"))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(size == 0, np.where(change > 0, np.inf, 0.0), change / size))


def _plain(name: str) -> Callable[[Raw], Vector]:
    return lambda raw: _get(raw, name)


FORMULAS: dict[str, Callable[[Raw], Vector]] = {
    "norm": _norm,
    "rms": _rms,
    "mean": _share("sum"),
    "abs_mean": _share("abs_sum"),
    "mean_square": lambda raw: 2.0 * _share("square")(raw),  # the device has half the sum of squares
    "std": lambda raw: np.sqrt(np.maximum(_get(raw, "variance"), 0.0)),
    "abs_max": lambda raw: np.maximum(np.abs(_get(raw, "min")), np.abs(_get(raw, "max"))),
    "zero_share": _valid_share("nonzero", rest=True),
    "saturated_share": _valid_share("saturated"),
    "count": _plain("samples"),
    "identical_rows": _plain("identical"),
    "ratio": _ratio,
    "unchanged": lambda raw: (_get(raw, "largest") == 0).astype(np.float64),
    "abs_mean_ratio": lambda raw: _share("abs_change")(raw) / (_share("abs_before")(raw) + 1e-9),
    "swallowed_share": _share("swallowed"),
    "underflow_share": lambda raw: _get(raw, "underflow") / np.maximum(_get(raw, "nonzero"), 1.0),
    **{name: _plain(name) for name in ("min", "max", "nan", "inf", "nonfinite", "present", "dead_share", "batches", "positions")},
    **{name: _plain(name) for name in ("close", "constant", "entropy", "input_abs_max", "changed", "batch_axis")},
}


def _formula(statistic: str) -> Callable[[Raw], Vector] | None:
    return _valid_share(statistic) if limits_of(statistic) is not None else FORMULAS.get(statistic)

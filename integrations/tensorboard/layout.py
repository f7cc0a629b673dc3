"""Snapshots as arrays: which row, column and series column holds what, and back again without a changed bit.

``trainvet/stats``: float32 [L, S]. Row i is ``subjects[i]`` = [kind, name]; a parameter's row holds its gradient, weight and update
statistics. Column j of a row of kind k is ``statistics[k][j]``, a key such as "gradient.norm"; S is the largest number of keys of any
kind. A cell that was not measured holds the quiet NaN ``ABSENT32``; a measured NaN is 0x7fc00000.

``trainvet/series``: float64 [R, C], one row per step and number of applied steps. Columns 0 and 1 are ``step`` and ``applied``, the others
[key, subject] as ``series`` says; not measured is the quiet NaN ``ABSENT64``.

``trainvet/snapshot``: float64 [9], the columns ``META``.

The JSON in ``trainvet/schema`` names all of this. Each change makes a new ``generation``, and a snapshot names the one it was written with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trainvet.meaning import meaning
from trainvet.recording import Single, single
from trainvet.statistics import Snapshot, Table, Track, Vector, kind_of

VERSION = 1
ABSENT32 = 0x7FC0AB5E
ABSENT64 = 0x7FF800000000AB5E
META = ("step", "applied", "batch", "epoch", "urgent", "generation", "sampled", "thinned", "dropped")
Index = np.ndarray[Any, np.dtype[np.int64]]
_NONE: Index = np.empty(0, dtype=np.int64)
MOST_SUBJECTS, MOST_COLUMNS = 1_000_000, 10_000


@dataclasses.dataclass
class Layout:
    """Rows, columns and series columns; grows with what snapshots hold (:meth:`fit`)."""

    generation: int = 0
    subjects: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    statistics: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    orders: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    series: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    _rows: dict[str, tuple[tuple[str, ...], Index]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def fit(self, snapshot: Snapshot) -> bool:
        """Make room for everything in ``snapshot``. True when that changed the layout: the schema must then be written again."""
        changed = False
        for target, table in snapshot.tables.items():
            kind = kind_of(target)
            order = self.orders.get(target, ())
            if table.names != order and not _is_part(table.names, order):
                held = set(table.names)
                self.orders[target] = (*table.names, *(name for name in order if name not in held))
                changed = True
                for name in table.names:
                    self.subjects.setdefault((kind, name), len(self.subjects))
            columns = self.statistics.setdefault(kind, {})
            for statistic in table.columns:
                if f"{target}.{statistic}" not in columns:
                    columns[f"{target}.{statistic}"] = len(columns)
                    changed = True
        for key, tracks in snapshot.series.items():
            for name in tracks:
                if (key, name) not in self.series:
                    self.series[key, name] = len(self.series) + 2
                    changed = True
        self.generation += changed
        return changed

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return max(map(len, self.statistics.values()), default=0)

    def pack_tables(self, snapshot: Snapshot) -> Single:
        """Float32 [L, S] of a snapshot that :meth:`fit` has seen."""
        matrix: Single = np.full((len(self.subjects), self.width), ABSENT32, dtype=np.uint32).view(np.float32)
        for target, table in snapshot.tables.items():
            if table.names and table.columns:
                columns = self.statistics[kind_of(target)]
                places = np.array([columns[f"{target}.{statistic}"] for statistic in table.columns], dtype=np.int64)
                matrix[self._index(target, table.names)[:, None], places] = single(np.array(list(table.columns.values()), dtype=np.float64)).T
        return matrix

    def _index(self, target: str, names: tuple[str, ...]) -> Index:
        known, rows = self._rows.get(target, ((), _NONE))
        if known != names:
            kind = kind_of(target)
            rows = np.array([self.subjects[kind, name] for name in names], dtype=np.int64)
            self._rows[target] = names, rows
        return rows

    def pack_series(self, snapshot: Snapshot) -> Vector:
        """Float64 [R, C] of a snapshot that :meth:`fit` has seen."""
        tracks = [(self.series[key, name], track) for key, by_name in snapshot.series.items() for name, track in by_name.items() if len(track.steps)]
        if tracks and _alike([track for _, track in tracks]):
            first = tracks[0][1]
            out = self._empty_series(len(first.steps))
            out[:, 0], out[:, 1] = first.steps, first.applied
            for column, track in tracks:
                out[:, column] = _one_nan(track.values)
            return out
        places: dict[tuple[int, int, int], int] = {}
        rows = []
        for _, track in tracks:
            times: dict[tuple[int, int], int] = {}
            row = []
            for pair in zip(track.steps.tolist(), track.applied.tolist(), strict=True):
                times[pair] = times.get(pair, -1) + 1
                row.append((*pair, times[pair]))
            rows.append(row)
            places.update(dict.fromkeys(row, 0))
        places = {moment: index for index, moment in enumerate(sorted(places))}
        out = self._empty_series(len(places))
        for moment, index in places.items():
            out[index, :2] = moment[:2]
        for (column, track), row in zip(tracks, rows, strict=True):
            out[[places[moment] for moment in row], column] = _one_nan(track.values)
        return out

    def _empty_series(self, rows: int) -> Vector:
        out = np.empty((rows, len(self.series) + 2), dtype=np.uint64)
        out.fill(ABSENT64)
        return out.view(np.float64)

    def unpack(self, snapshot: Snapshot, matrix: Single | None, rows: Vector | None) -> Snapshot:
        """The snapshot with its tables and series. Raises ValueError where an array does not fit the layout."""
        tables: dict[str, Table] = {}
        series: dict[str, dict[str, Track]] = {}
        if matrix is not None:
            if matrix.shape != (len(self.subjects), self.width) or matrix.dtype != np.float32:
                raise ValueError(f"stats of shape {matrix.shape} do not fit the schema ({len(self.subjects)}, {self.width})")
            present = matrix.view(np.uint32) != ABSENT32
            for target, order in self.orders.items():
                kind = kind_of(target)
                places = {key.split(".", 1)[1]: place for key, place in self.statistics[kind].items() if key.startswith(f"{target}.")}
                index = np.array([self.subjects[kind, name] for name in order], dtype=np.int64)
                there = present[np.ix_(index, np.array(list(places.values()), dtype=np.int64))]
                held = np.flatnonzero(there.any(axis=1))
                columns = {name: matrix[index[held], place].astype(np.float64) for name, place in places.items() if present[index, place].any()}
                if columns:
                    tables[target] = Table(tuple(order[position] for position in held.tolist()), columns)
        if rows is not None:
            if rows.ndim != 2 or rows.shape[1] != len(self.series) + 2 or rows.dtype != np.float64:
                raise ValueError(f"series of shape {rows.shape} do not fit the schema (rows, {len(self.series) + 2})")
            bits = rows.view(np.uint64)
            steps, applied = (_whole(rows[:, column]) for column in (0, 1))
            for (key, name), column in self.series.items():
                kept = bits[:, column] != ABSENT64
                if kept.any():
                    series.setdefault(key, {})[name] = Track(steps[kept], applied[kept], rows[kept, column].copy())
        return dataclasses.replace(snapshot, tables=tables, series=series)

    def to_dict(self) -> dict[str, Any]:
        """The schema in JSON types."""
        keys = [key for columns in self.statistics.values() for key in columns]
        names = list(self.subjects)
        return {
            "v": VERSION,
            "generation": self.generation,
            "subjects": [list(item) for item in names],
            "statistics": {kind: list(columns) for kind, columns in self.statistics.items()},
            "tables": {target: [self.subjects[kind_of(target), name] for name in order] for target, order in self.orders.items()},
            "series": ["step", "applied", *(list(item) for item in self.series)],
            "snapshot": list(META),
            "absent": {"float32": f"{ABSENT32:#x}", "float64": f"{ABSENT64:#x}"},
            "meaning": {key: meaning(key) for key in [*keys, *dict.fromkeys(key for key, _ in self.series)]},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Layout:
        """The inverse of :meth:`to_dict`. Raises ValueError for a schema that is not one, or of a later version."""
        try:
            if data["v"] != VERSION:
                raise ValueError(f"format version {data['v']!r} is not known here (1 is)")
            subjects = {(str(kind), str(name)): index for index, (kind, name) in enumerate(data["subjects"])}
            names = list(subjects)
            statistics = {str(kind): {str(key): place for place, key in enumerate(keys)} for kind, keys in data["statistics"].items()}
            orders = {str(target): tuple(names[row][1] for row in rows) for target, rows in data["tables"].items()}
            series = {(str(key), str(name)): index + 2 for index, (key, name) in enumerate(data["series"][2:])}
            layout = cls(int(data["generation"]), subjects, statistics, orders, series)
            fits = all((kind_of(target), name) in subjects for target, order in orders.items() for name in order)
            whole = len(subjects) == len(data["subjects"]) and len(series) == len(data["series"]) - 2
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a schema of trainvet: {error!r}") from None
        if not fits or not whole or any(kind_of(target) not in statistics for target in orders):
            raise ValueError("the schema contradicts itself")
        if len(subjects) > MOST_SUBJECTS or max(layout.width, len(series)) > MOST_COLUMNS:
            raise ValueError(f"a schema of {len(subjects)} subjects and {layout.width} columns is over the limit")
        return layout


def meta(snapshot: Snapshot, generation: int, thinned: int, dropped: int) -> Vector:
    """The numbers ``META`` of a snapshot."""
    own = (snapshot.step, snapshot.applied, snapshot.batch, snapshot.epoch, snapshot.urgent, generation, bool(snapshot.tables), thinned, dropped)
    return np.array(own, dtype=np.float64)


def read_meta(numbers: np.ndarray[Any, Any]) -> tuple[Snapshot, dict[str, int]]:
    """A snapshot without its numbers, and ``META`` by name. Raises ValueError for anything else."""
    if numbers.shape != (len(META),):
        raise ValueError(f"{len(META)} numbers were expected of a snapshot, found shape {numbers.shape}")
    by_name = dict(zip(META, _whole(numbers).tolist(), strict=True))
    return Snapshot(by_name["step"], by_name["applied"], by_name["batch"], by_name["epoch"], urgent=bool(by_name["urgent"])), by_name


def _alike(tracks: list[Track]) -> bool:
    """Do all tracks hold the same steps in growing order?"""
    first = tracks[0]
    if len(first.steps) > 1 and not bool(np.all(first.steps[1:] > first.steps[:-1])):
        return False
    return all(
        (track.steps is first.steps or np.array_equal(track.steps, first.steps))
        and (track.applied is first.applied or np.array_equal(track.applied, first.applied))
        for track in tracks[1:]
    )


def _one_nan(values: Vector) -> Vector:
    """The values with every NaN as the same NaN, none of which is ``ABSENT64``."""
    nan = np.isnan(values)
    return np.where(nan, np.nan, values) if nan.any() else values


def _whole(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not np.all(np.abs(numbers) < 2.0**53):
        raise ValueError("a step is not a whole number")
    return numbers.astype(np.int64)


def _is_part(names: tuple[str, ...], order: tuple[str, ...]) -> bool:
    """Are ``names`` in ``order``, in this sequence?"""
    rest = iter(order)
    return all(name in rest for name in names)

"""What was measured so far, kept in bounded memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvet.statistics import Snapshot, is_known

LIMIT = 2048
CELLS = 1 << 18  # values of one statistic over all subjects: 2 MB


@dataclasses.dataclass(frozen=True)
class History:
    """One statistic over the run: steps int64 [T], subjects (S names), values float64 [T, S], NaN where a subject was not measured."""

    steps: npt.NDArray[np.int64]
    subjects: tuple[str, ...]
    values: npt.NDArray[np.float64]


class Recorder:
    """Keeps every statistic that was handed over. What reaches ``limit`` rows (sampled statistics: or CELLS values) drops every second row and
    from then on keeps every second (fourth, …) one, so memory stays constant and the whole run stays covered."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._sampled: dict[tuple[str, ...], dict[str, _Thinned]] = {}  # by the table's names: optimizers may take turns
        self._series: dict[str, dict[str, _Thinned]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take over the snapshot's numbers."""
        step = np.array([snapshot.step], dtype=np.int64)
        for target, table in snapshot.tables.items():
            rows = self._sampled.setdefault(table.names, {})
            limit = max(2, min(self.limit, CELLS // max(1, len(table.names))))
            for statistic, vector in table.columns.items():
                rows.setdefault(f"{target}.{statistic}", _Thinned(limit)).append(step, [vector])
        for key, tracks in snapshot.series.items():
            kept = self._series.setdefault(key, {})
            for name, track in tracks.items():
                kept.setdefault(name, _Thinned(self.limit)).append(track.steps, track.values)

    def get(self, key: str) -> History:
        """The history of ``key``. Raises KeyError for a statistic that does not exist; one that was never measured has no rows."""
        if not is_known(key):
            raise KeyError(f"unknown statistic {key!r}; trainvet.statistics.MEANING lists them")
        columns: dict[str, list[tuple[int, float]]] = {}
        for name, series in self._series.get(key, {}).items():
            columns[name] = list(zip(series.steps(), series.rows(), strict=True))
        for names, tables in self._sampled.items():
            if key in tables:
                for step, vector in zip(tables[key].steps(), tables[key].rows(), strict=True):
                    for name, value in zip(names, vector.tolist(), strict=True):
                        columns.setdefault(name, []).append((step, value))
        steps = sorted({step for cells in columns.values() for step, _ in cells})
        place = {step: index for index, step in enumerate(steps)}
        values = np.full((len(steps), len(columns)), np.nan)
        for column, cells in enumerate(columns.values()):
            for step, value in cells:
                values[place[step], column] = value
        return History(np.array(steps, dtype=np.int64), tuple(columns), values)


class _Thinned:
    """Rows in chunks, at most ``limit`` of them: every ``stride``-th row that was appended."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stride = 1
        self.seen = self.kept = 0
        self.chunks: list[tuple[npt.NDArray[np.int64], Any]] = []

    def append(self, steps: npt.NDArray[np.int64], rows: Any) -> None:
        offset = -self.seen % self.stride
        self.seen += len(steps)
        if self.stride > 1:
            steps, rows = steps[offset :: self.stride], rows[offset :: self.stride]
        if not len(steps):
            return
        self.chunks.append((steps, rows))
        self.kept += len(steps)
        while self.kept > self.limit:
            all_steps, all_rows = self.steps(), self.rows()
            self.stride *= 2
            self.chunks = [(np.array(all_steps[::2], dtype=np.int64), all_rows[::2])]
            self.kept = len(all_rows[::2])

    def steps(self) -> list[int]:
        return [int(step) for steps, _ in self.chunks for step in steps]

    def rows(self) -> list[Any]:
        return [row for _, rows in self.chunks for row in rows]

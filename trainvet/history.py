"""What was measured so far, kept in bounded memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from trainvet.statistics import MEANING, Snapshot

LIMIT = 2048


@dataclasses.dataclass(frozen=True)
class History:
    """One statistic over the run: steps int64 [T], subjects (S names), values float64 [T, S], NaN where a subject was not measured."""

    steps: npt.NDArray[np.int64]
    subjects: tuple[str, ...]
    values: npt.NDArray[np.float64]


class Recorder:
    """Keeps every statistic that was handed over; a key that reaches ``limit`` rows drops every second one and from then on keeps
    every second (fourth, …) row, so memory stays constant and the whole run stays covered."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._rows: dict[str, list[tuple[int, tuple[str, ...], npt.NDArray[np.float64]]]] = {}
        self._stride: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take over the snapshot's numbers."""
        for target, table in snapshot.tables.items():
            for statistic, vector in table.columns.items():
                self._append(f"{target}.{statistic}", snapshot.step, table.names, vector)
        for key, tracks in snapshot.series.items():
            for name, track in tracks.items():
                for step, value in zip(track.steps.tolist(), track.values, strict=True):
                    self._append(key, step, (name,), np.array([value]))

    def _append(self, key: str, step: int, names: tuple[str, ...], vector: npt.NDArray[np.float64]) -> None:
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        stride = self._stride.get(key, 1)
        if seen % stride:
            return
        rows = self._rows.setdefault(key, [])
        rows.append((step, names, vector))
        if len(rows) >= self.limit:
            del rows[1::2]
            self._stride[key] = stride * 2

    def get(self, key: str) -> History:
        """The history of ``key``. Raises KeyError for a statistic that does not exist; one that was never measured has no rows."""
        if key not in MEANING:
            raise KeyError(f"unknown statistic {key!r}; trainvet.statistics.MEANING lists them")
        rows = self._rows.get(key, [])
        subjects: dict[str, int] = {}
        for _, names, _ in rows:
            for name in names:
                subjects.setdefault(name, len(subjects))
        steps = sorted({step for step, _, _ in rows})
        place = {step: index for index, step in enumerate(steps)}
        values = np.full((len(steps), len(subjects)), np.nan)
        for step, names, vector in rows:
            values[place[step], [subjects[name] for name in names]] = vector
        return History(np.array(steps, dtype=np.int64), tuple(subjects), values)

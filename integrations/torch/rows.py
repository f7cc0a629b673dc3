"""The every-step numbers between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from trainvet.statistics import Snapshot, Table, Track


class Rows:
    """Collects one row per optimizer-step attempt on the host and hands them over as tracks."""

    def __init__(self, applied: int = 0) -> None:
        """``applied``: attempts before the first row that changed weights."""
        self.applied = applied
        self._steps: list[int] = []
        self._applied: list[int] = []
        self._cells: dict[str, dict[str, tuple[list[int], list[float]]]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> int:
        """The newest step."""
        return self._steps[-1]

    def add(
        self,
        step: int,
        loss_name: str,
        loss: float | None,
        norm: float,
        groups: tuple[str, ...],
        rates: tuple[float, ...],
        scale: float | None = None,
        skipped: bool | None = None,
        changed: bool = True,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """One attempt. ``changed``: did it move weights; ``groups`` and ``rates``: learning rates by group; ``more``: other numbers of the run."""
        self.applied += changed
        place = len(self._steps)
        self._steps.append(step)
        self._applied.append(self.applied)
        if loss is not None:
            self._put("loss.value", loss_name, place, loss)
        self._put("run.gradient_norm", "run", place, norm)
        for name, rate in zip(groups, rates, strict=True):
            self._put("optimizer.learning_rate", name, place, rate)
        if scale is not None:
            self._put("run.loss_scale", "run", place, scale)
        if skipped is not None:
            self._put("run.skipped", "run", place, float(skipped))
        for key, value in more.items():
            self._put(key, "run", place, value)

    def flush(self, step: int, batch: int, epoch: int, tables: dict[str, Table]) -> Snapshot:
        """All rows since the last flush as a snapshot that ends at ``step``."""
        steps, applied = np.array(self._steps, dtype=np.int64), np.array(self._applied, dtype=np.int64)
        series = {
            key: {
                name: Track(steps, applied, np.array(values))
                if len(places) == len(steps)
                else Track(steps[places], applied[places], np.array(values))
                for name, (places, values) in cells.items()
            }
            for key, cells in self._cells.items()
        }
        self._steps, self._applied, self._cells = [], [], {}
        return Snapshot(step, self.applied, batch, epoch, tables, series)

    def _put(self, key: str, name: str, place: int, value: float) -> None:
        places, values = self._cells.setdefault(key, {}).setdefault(name, ([], []))
        places.append(place)
        values.append(value)

"""The host's clock over a run: how long a step takes, how much of that is spent waiting for data, and how many samples it holds."""

from __future__ import annotations

import time
from typing import Any

from trainvet.integrations.torch.losses import tensors_in

KEYS = frozenset({"run.step_seconds", "run.wait_seconds", "run.batch_size", "run.noise_scale"})


class Pace:
    """Told of the marks of a step; nothing is asked of the device.

    Our own work (``own``: seconds spent in trainvet so far) and evaluations are taken out. A step during which something unknown was done, such as
    a checkpoint being written, has no times, and one whose samples cannot be counted has no size.
    """

    def __init__(self, processes: int = 1, waits: bool = True) -> None:
        """``waits``: the edge says when a batch is asked for and when it has come."""
        self.processes = processes
        self.waits = waits
        self.first = 0
        self._samples = 0
        self._countable = True
        self._end: tuple[float, float] | None = None
        self._idle: tuple[float, float] | None = None
        self._wait = 0.0
        self._away: float | None = None
        self._absent = self._absent_idle = 0.0

    # ---- marks, in the order of a step

    def batch(self, batch: Any, own: float) -> None:
        """A batch has come, and its forward begins."""
        if self.waits and self._idle is not None:
            self._wait += max(0.0, time.perf_counter() - self._idle[0] - (own - self._idle[1]) - self._absent_idle)
        self._idle, self._absent_idle = None, 0.0
        size = samples(batch)
        self._countable = self._countable and size > 0
        self.first = self.first or size
        self._samples += size

    def again(self) -> None:
        """Another forward of the same step, of which it is not known whether it sees new samples."""
        self._countable = False

    def step(self, own: float) -> dict[str, float]:
        """The optimizer step is done: its numbers, without what is not known of it."""
        now = time.perf_counter()
        cells: dict[str, float] = {}
        if self._countable and self._samples:
            cells["run.batch_size"] = float(self._samples * self.processes)
        if self._end is not None:
            cells["run.step_seconds"] = max(0.0, now - self._end[0] - (own - self._end[1]) - self._absent)
            if self.waits:
                cells["run.wait_seconds"] = min(self._wait, cells["run.step_seconds"])
        self._end, self._samples, self.first, self._countable = (now, own), 0, 0, True
        self._wait = self._absent = 0.0
        return cells

    def idle(self, own: float) -> None:
        """The batch is over, the next one is asked for."""
        if self.waits:
            self._idle = time.perf_counter(), own

    # ---- what does not count

    def leave(self) -> None:
        """An evaluation begins."""
        self._away = time.perf_counter()

    def back(self) -> None:
        """The evaluation is over."""
        if self._away is not None:
            gone = time.perf_counter() - self._away
            self._absent += gone
            self._absent_idle += gone
        self._away = None

    def spoil(self) -> None:
        """Something else takes time before the next step: a checkpoint, an epoch's end. The next step has no times."""
        self._end = self._idle = None


def samples(batch: Any) -> int:
    """The first dimension of the first tensor in a batch; 0 where there is none."""
    for _, tensor in tensors_in(batch):
        return int(tensor.shape[0]) if tensor.dim() else 0
    return 0

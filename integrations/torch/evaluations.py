"""Evaluations between two steps of a training: looked at as long as that works, and told as a snapshot of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import nn

from trainvet.integrations.torch.evaluation import Evaluation
from trainvet.monitor import Monitor
from trainvet.statistics import Snapshot, Table, Track


class Evaluations:
    """The first batches of each evaluation, where a rule asks for them. An error of ours ends that part alone."""

    def __init__(self, module: nn.Module, monitor: Monitor, modules: Callable[[], Mapping[int, str] | None]) -> None:
        """``modules``: module id -> dotted path; None where hooks would not run."""
        self.alive = True
        self._module, self._monitor, self._modules = module, monitor, modules
        self._evaluation = Evaluation(module)

    def start(self) -> None:
        """A batch begins; only the first ones are looked at."""
        paths = self._modules()
        if paths is not None and self._wanted() and not self._evaluation.done:
            try:
                self._evaluation.start(self._module, paths)
            except Exception:
                self._give_up()

    def pause(self) -> None:
        """The batch is over."""
        if self._wanted():
            try:
                self._evaluation.pause()
            except Exception:
                self._give_up()

    def stop(self) -> dict[str, Table]:
        """The evaluation is over."""
        if self._wanted():
            try:
                return self._evaluation.stop()
            except Exception:
                self._give_up()
        return {}

    def close(self) -> None:
        """Nothing of ours stays."""
        if self.alive:
            self._evaluation.stop()

    def _wanted(self) -> bool:
        return self.alive and any(key.startswith(("validation_input.", "validation_module.")) for key in self._monitor.keys)

    def _give_up(self) -> None:
        self.alive = False
        self._monitor.failed("looking at evaluations was switched off")
        try:
            self._evaluation.stop()
        except Exception:
            self._monitor.failed("leaving the evaluation failed")


def aside(step: int, applied: int, batch: int, epoch: int, tables: Mapping[str, Table], metrics: Mapping[str, float]) -> Snapshot:
    """What an evaluation or an epoch's end has to tell, at the step before it."""
    at, count = np.array([step], dtype=np.int64), np.array([applied], dtype=np.int64)
    series = {"metric.value": {name: Track(at, count, np.array([value], dtype=np.float64)) for name, value in metrics.items()}} if metrics else {}
    return Snapshot(step, applied, batch, epoch, tables, series)

"""What is known of every step: the losses, the learning rates, the loss scale, and which steps changed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainvet.integrations.keras import facts as known
from trainvet.integrations.keras.layout import Reading
from trainvet.integrations.keras.losses import Instant, RunningMean
from trainvet.integrations.keras.schedules import rates
from trainvet.integrations.keras.series import Series
from trainvet.statistics import Track, Vector


class Journal:
    """Turns logs and readings into series. A step is handed in once, in order; ``first`` is the next one when the fit begins."""

    def __init__(self, model: Any, optimizers: Mapping[str, Any], first: int, applied: int, before_bad: Callable[[int], None]) -> None:
        """``before_bad`` is called with the last good step when all is written of it and nothing yet of the bad one that follows."""
        self.model = model
        self.before_bad = before_bad
        self.optimizers = optimizers
        self.dynamic = next((optimizer for optimizer in optimizers.values() if getattr(optimizer, "inner_optimizer", None) is not None), None)
        self.accumulation = known.accumulation_of(optimizers.values())
        self.iterations = {name: whole(known.inner(optimizer)._iterations) for name, optimizer in optimizers.items()}
        start = next(iter(self.iterations.values()), 0)
        self.series = Series(applied, self.accumulation, start % self.accumulation)
        self._first = self._next = self._block = first
        self._losses: dict[str, RunningMean] = {}
        self._names: list[str] = []
        self._rates: dict[str, tuple[int, float]] = {}
        self._scale = math.nan

    def updates(self, step: int) -> bool:
        """Does this step update weights, or only add to the accumulated gradients?"""
        start = next(iter(self.iterations.values()), 0)
        return (start + step - self._first + 1) % self.accumulation == 0

    def begin_epoch(self) -> None:
        """Keras has reset its metrics."""
        for loss in self._losses.values():
            loss.begin_epoch()

    def end_epoch(self) -> None:
        """The last batch of the epoch is over, and the metrics still hold its numbers."""
        for name, loss in self._losses.items():
            if loss.waiting:
                self._put_loss(name, loss.close(self._count(name)))

    def light(self, blocks: Sequence[tuple[int, Any, int]]) -> bool:
        """Blocks that were not measured as a whole: (last step, logs, batches). True when a loss has become non-finite in them."""
        broke = False
        for place, (step, logs, batches) in enumerate(blocks):
            if self.dynamic is not None:
                self._follow_scale(step)
            self._advance(step)
            self._block = step + 1
            for name in self._names or self._find_names(logs):
                loss, value = self._losses.get(name), float(logs[name])
                if loss is None:
                    count = self._count(name)
                    loss = self._losses[name] = RunningMean() if count else Instant()
                    self._put_loss(name, loss.first(step, value, count or 0.0, batches))
                elif loss.light(step, value, batches):
                    count, since = self._count(name), sum(block[2] for block in blocks[place:])
                    self._put_loss(name, loss.close(None if count is None else count - (loss.weight or 0.0) * since))
                    if not broke:
                        self.before_bad(step - batches)
                    self._put_loss(name, [(step, value)])
                    broke = True
        return broke

    def measured(self, step: int, logs: Any, reading: Reading, bad: bool, held: bool, dropped: bool, block: int) -> None:
        """One batch of a block of ``block`` batches was measured. ``bad``: it is not finite; ``held``: the guard kept its update back;
        ``dropped``: and the run goes on."""
        skipped = dropped or (self.dynamic is not None and reading.number("run", "advanced", 1.0) == 0)
        self._advance(step - 1)
        self._advance(step, not skipped and not held)
        run = dict(zip(reading.layout.names["run"], reading.raw["run"]["value"].tolist(), strict=True))
        ready: list[tuple[str, int, float]] = []
        for name in self._names or self._find_names(logs):
            count = run.get(f"count:{name}")
            if name not in self._losses:  # a metric that counts nothing is not where the user's own step gets its loss from
                self._losses[name] = RunningMean() if count else Instant()
            loss = self._losses[name]
            exact = reading.number("loss", "loss") if name == "loss" and "loss" in reading.raw else None
            value = float(logs[name])
            if block == 1:
                found = loss.sampled(step, value, count, run.get("batch", 0.0), exact)
            else:
                found = loss.verify(count, step - self._block + 1, run.get("batch", 0.0))
                wrong = next((number for number in (exact, value) if number is not None and not math.isfinite(number)), None)
                if wrong is not None and not loss.broken:
                    loss.broken = True
                    found = [*found, (step, wrong)]
            ready += [(name, at, number) for at, number in found]
        for now in (False, True):
            if now and bad:
                self.before_bad(step - 1)
            for name, at, number in ready:
                if (at == step) == now:
                    self._put_loss(name, [(at, number)])
        for name in self.optimizers:
            self._put_rate(name, step, run.get(f"iterations:{name}"), reading)
        if self.dynamic is not None:
            self.series.add("run.loss_scale", "run", step, run.get("scale", self._scale))
            self._scale = scalar(self.dynamic.dynamic_scale)
        if self.dynamic is not None or dropped:
            self.series.add("run.skipped", "run", step, float(skipped))

    def batches_in_epoch(self) -> int | None:
        """Batches of the present epoch by the loss metric's count; None where it has none."""
        loss, count = self._losses.get("loss"), self._count("loss")
        return math.ceil(count / loss.weight - 1e-6) if loss is not None and loss.weight and count else None

    def gradient_norm(self, step: int, value: float) -> None:
        """The norm over all gradients of a measured step."""
        self.series.add("run.gradient_norm", "run", step, value)

    def add(self, key: str, step: int, value: float | None) -> None:
        """A number of the run at one step; None: there is none."""
        if value is not None:
            self.series.add(key, "run", step, value)

    def applied(self, step: int) -> int:
        """How many steps up to this one changed weights."""
        return self.series.applied_at(step)

    def flush(self, step: int) -> Mapping[str, Mapping[str, Track]]:
        """Everything since the last flush, which ends at ``step``."""
        return self.series.flush(step)

    # ---- inside

    def _advance(self, step: int, changed: bool = True) -> None:
        while self._next <= step:
            self.series.step(self._next, changed)
            self._next += 1

    def _follow_scale(self, step: int) -> None:
        """A dynamic loss scale is read after every block: one that has fallen says how many of its last steps were skipped."""
        assert self.dynamic is not None
        scale = scalar(self.dynamic.dynamic_scale)
        halved = round(math.log2(self._scale / scale)) if scale > 0 and self._scale > scale else 0
        for at in range(self._next, step + 1):
            skipped = at > step - halved
            self.series.add("run.loss_scale", "run", at, self._scale if math.isfinite(self._scale) else scale)
            self.series.add("run.skipped", "run", at, float(skipped))
            self._advance(at, not skipped)
        self._scale = scale

    def _find_names(self, logs: Any) -> list[str]:
        self._names = known.loss_names(logs)
        return self._names

    def _count(self, name: str) -> float | None:
        metric = known.running_means(self.model).get(name)
        return None if metric is None else scalar(metric.count)

    def _put_loss(self, name: str, values: Sequence[tuple[int, float]]) -> None:
        for step, value in values:
            self.series.add("loss.value", name.removesuffix("_loss"), step, value)

    def _put_rate(self, name: str, step: int, at: float | None, reading: Reading) -> None:
        """A measured step's rate, and those of the steps since the one before it where they are known: constant, or from the schedule.

        A schedule is evaluated here: a second reader of its value in the step would change how the graph is optimised, and so the last bit.
        """
        optimizer, group = self.optimizers[name], known.group_of(name, self.optimizers[name])
        schedule, before = getattr(known.inner(optimizer), "_learning_rate", None), self._rates.get(name)
        between = np.arange(before[0] + 1 if before is not None else step, step)
        values: Vector | None = None
        rate: float | None = None
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            now = rates(schedule, np.array([at])) if at is not None else None
            rate = float(now[0]) if now is not None else None
            if at is not None and self.dynamic is None and type(schedule).__module__.startswith("keras."):
                values = rates(schedule, at - step + between.astype(np.float64))
        else:
            rate = reading.number("optimizer", name, math.nan) if name in reading.layout.names.get("optimizer", ()) else None
            values = np.full(len(between), before[1]) if before is not None and before[1] == rate else None
        if rate is None:
            return
        for at_step, value in zip(between.tolist(), [] if values is None else values.tolist(), strict=values is not None):
            self.series.add("optimizer.learning_rate", group, at_step, value)
        self.series.add("optimizer.learning_rate", group, step, rate)
        self._rates[name] = (step, rate)


def scalar(variable: Any) -> float:
    """A Keras variable on the host."""
    return float(keras.ops.convert_to_numpy(variable))


def whole(variable: Any) -> int:
    """An integer Keras variable on the host."""
    return int(keras.ops.convert_to_numpy(variable))

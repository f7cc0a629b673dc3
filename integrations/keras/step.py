"""The one place where the user's training is touched: ``model.train_function``, from the beginning of a batch until its step returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from trainvet.action import TrainingAborted
from trainvet.integrations.keras.backend import Backend, Outcome, Step, UnmeasurableError

SLOW = 2e-2  # seconds of a step beyond which its loss is looked at at once; of quicker ones several are, together
TOGETHER = 16
AHEAD = 1 << 16


class Listener(Protocol):
    """What the stepper tells, and asks."""

    def due(self, step: int) -> bool:
        """Is this step to be measured?"""

    def taken(self, batches: int) -> int:
        """How many batches the block held that has just run: the last one of an epoch may be shorter."""

    def build(self, full: bool) -> Step:
        """A measured step, or (not ``full``) one that only guards."""

    def light(self, blocks: list[tuple[int, Any, int]]) -> None:
        """Blocks are over (last step, logs, batches) that were trained on by the user's own function, or (more than one batch) in part by ours."""

    def measured(self, logs: dict[str, Any], outcome: Outcome, batch: Any, full: bool) -> None:
        """One batch was trained on by a step of ours. May raise TrainingAborted."""

    def refused(self, reason: str) -> None:
        """Steps of ours are not possible; what the user's function logs still is told."""

    def failed(self, what: str) -> None:
        """An error of ours (called while it is handled)."""


class Stepper:
    """Stands in for ``model.train_function`` during one call and decides which function trains.

    Keras reads ``model.train_function`` at every batch, after ``on_train_batch_begin``: :meth:`arm`, called from there, puts this object in its
    place, and the call takes it away again before anything else. So whatever raises, at the end of a batch nothing of ours is on the model.
    A batch that is not measured goes through the user's own compiled function, ``steps_per_execution`` included; the block that holds
    a measured batch is pulled from the iterator batch by batch.
    """

    def __init__(self, model: Any, backend: Backend, listener: Listener, guard: bool) -> None:
        self.model = model
        self.backend = backend
        self.listener = listener
        self.guard = guard
        self.step = 0
        self.begun = 0  # batches that began, of training and of evaluations, measured or not: the run moves
        self.next_due = 0
        self.light_seconds = 0.0  # a step of the user's own, running mean
        self.own_seconds = self.sampled_seconds = 0.0
        self.active = True
        self.timed = False
        self._usual = 0.0  # seconds of a step of the user's own, slow ones aside
        self.ended: float | None = None  # the end of the step before, on the host clock
        self.times: list[tuple[int, int, float, float | None]] = []  # last step, batches, seconds, seconds waited
        self.together = TOGETHER
        self.steps: dict[bool, Step] = {}
        self._attributes: dict[str, Any] = model.__dict__
        self._history = getattr(model, "history", None)
        self._original: Callable[[Any], Any] | None = None
        self._batches = 1
        self._single: Callable[[Any], Any] | None = None
        self._blocks: list[tuple[int, Any, int]] = []

    def arm(self, batch: int = 0, logs: Any = None) -> None:
        """A batch begins. (The arguments are those of ``on_train_batch_begin``.)"""
        self.begun += 1
        if not self.active:
            return
        attributes = self._attributes
        function = attributes.get("train_function")
        if function is not self._original:
            if function is None or function is self:
                return
            if self._original is not None:  # the user compiled again
                self.forget()
            self._original, self._batches = function, int(self.model.steps_per_execution)
        attributes["train_function"] = self

    def tick(self, batch: int = 0, logs: Any = None) -> None:
        """A batch of an evaluation begins. (The arguments are those of ``on_test_batch_begin``.)"""
        self.begun += 1

    def forget(self) -> None:
        """Build the measured functions anew before they are needed next."""
        self.steps, self._single = {}, None

    def take_over(self, earlier: Stepper) -> None:
        """Go on with what an earlier fit of the same model has traced; valid as long as the user does not compile again."""
        self._original, self._batches = earlier._original, earlier._batches
        self.steps, self._single = earlier.steps, earlier._single

    def disarm(self) -> None:
        """The user's function is back, for good."""
        self.active = False
        if self._attributes.get("train_function") is self:
            self._attributes["train_function"] = self._original

    def look_ahead(self) -> None:
        """Ask when the next step is due; to be called whenever that may have changed."""
        self.next_due = self.step
        while self.next_due < self.step + AHEAD and not self.listener.due(self.next_due):
            self.next_due += 1

    def hand_over(self) -> None:
        """Tell of the blocks that were not told of yet."""
        blocks, self._blocks = self._blocks, []
        if blocks and self.active:
            try:
                self.listener.light(blocks)
            except TrainingAborted:
                raise
            except Exception:
                self.listener.failed("reading a step")

    def __call__(self, iterator: Any) -> Any:
        """Train on the next batch or block."""
        original, attributes = self._original, self._attributes
        assert original is not None
        attributes["train_function"] = original
        if not self.active or attributes.get("history") is not self._history:  # a later fit without us, after one that broke off
            return original(iterator)
        if self.guard or self.next_due < self.step + self._batches:
            return self._pulled(iterator)
        started = time.perf_counter()
        logs = original(iterator)
        ended = time.perf_counter()
        taken = 1 if self._batches == 1 else self.listener.taken(self._batches)
        self.step += taken
        self._blocks.append((self.step - 1, logs, taken))
        if self.timed:
            if self.ended is not None:
                self.times.append((self.step - 1, taken, ended - self.ended, None))
                self._usual = min(self._usual or ended - started, 1.25 * (ended - started)) if taken == 1 else 0.0
            self.ended = ended
        if len(self._blocks) >= self.together or ended - started > SLOW:
            self.light_seconds += 0.1 * ((ended - started) / self._batches - self.light_seconds)
            self.hand_over()
            self.own_seconds += time.perf_counter() - ended
            self.ended = None  # what is read now is judged before the next step begins: our time, none of that step's
        return logs

    # ---- batch by batch

    def _pulled(self, iterator: Any) -> Any:
        original, batches, first = self._original, self._batches, self.step
        assert original is not None
        self.hand_over()
        # before a batch is taken: where our steps cannot be had, the user's function gets the whole block, as without us
        mine = {full: self._prepared(full, iterator) for full in self._kinds()}
        if None in mine.values():
            logs = original(iterator)
            taken = 1 if batches == 1 else self.listener.taken(batches)
            self.step += taken
            self._blocks.append((self.step - 1, logs, taken))
            self.hand_over()
            return logs
        logs = None
        for _ in range(batches):
            waiting = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:  # the user's function ends the epoch the way it always does
                    return original(iterator)
                break
            waiting = time.perf_counter() - waiting
            full = self.next_due <= self.step
            if self.timed and self._usual:  # ours takes longer than the user's own step would have
                self.times.append((self.step, 1, waiting + self._usual, waiting))
            step = mine.get(full) if self.active else None
            if step is not None:
                logs = self._measure(step, batch, full)
            else:
                logs = self._one(batch, iterator)
                self.step += 1
            if self.model.stop_training:
                break
        self.ended = None
        if self.active and batches > 1:
            self._blocks.append((self.step - 1, logs, self.step - first))
            self.hand_over()
        return logs

    def _kinds(self) -> list[bool]:
        """Which steps of ours this block may need: with all statistics, with the guard alone."""
        return [*([True] if self.next_due < self.step + self._batches else []), *([False] if self.guard else [])]

    def _measure(self, step: Step, batch: Any, full: bool) -> Any:
        started = time.perf_counter()
        logs, outcome = step(batch)
        self.step += 1
        try:
            self.listener.measured(logs, outcome, batch, full)
            if full:
                self.look_ahead()
        except TrainingAborted:
            raise
        except Exception:
            self.listener.failed("reading a step")
        extra = max(0.0, time.perf_counter() - started - self.light_seconds)
        self.own_seconds += extra
        self.sampled_seconds += extra * full
        return logs

    def _prepared(self, full: bool, iterator: Any) -> Step | None:
        """The measured step, traced; None where it cannot be had (then nothing has run yet)."""
        started = time.perf_counter()
        try:
            step = self.steps.get(full)
            if step is None:
                step = self.listener.build(full)
                step.prepare(iterator)
                self.steps[full] = step
            return step
        except UnmeasurableError as refusal:
            self.guard = False
            self.listener.refused(str(refusal))
        except Exception:  # the user's step may be at fault: then the user's own function raises the same
            self.active = False
            self.listener.failed("preparing a measured step")
        finally:
            self.own_seconds += time.perf_counter() - started
        return None

    def _one(self, batch: Any, iterator: Any) -> Any:
        original = self._original
        assert original is not None
        if self.model.run_eagerly:
            return original(iter([batch]))
        if self._single is None:
            self._single = self.backend.single(original, iterator)
        return self._single(batch)

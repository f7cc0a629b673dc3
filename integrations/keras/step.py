"""The one place where the user's training is touched: ``model.train_function``, from the beginning of a batch until its step returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from trainvet.integrations.keras.backend import Backend, Outcome, Step, UnmeasurableError


class Listener(Protocol):
    """What the stepper tells, and asks."""

    def due(self, step: int) -> bool:
        """Is this step to be measured?"""

    def build(self, full: bool) -> Step:
        """A measured step, or (not ``full``) one that only guards."""

    def light(self, logs: dict[str, Any], batches: int) -> None:
        """A block is over that was trained on by the user's own function, or (more than one batch) in part by steps of ours."""

    def measured(self, logs: dict[str, Any], outcome: Outcome, batch: Any, full: bool) -> None:
        """One batch was trained on by a step of ours. May raise TrainingAborted."""

    def refused(self, reason: str) -> None:
        """Measuring is not possible."""

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
        self.light_seconds = 0.0  # a step of the user's own, running mean
        self.own_seconds = self.sampled_seconds = 0.0
        self.active = True
        self._attributes: dict[str, Any] = model.__dict__
        self._history = getattr(model, "history", None)
        self._original: Callable[[Any], Any] | None = None
        self.steps: dict[bool, Step] = {}
        self._single: Callable[[Any], Any] | None = None

    def arm(self) -> None:
        """A batch begins."""
        function = self._attributes.get("train_function")
        if not self.active or function is None or function is self:
            return
        if function is not self._original:  # the first batch, or the user compiled again
            self._original = function
            self.forget()
        self._attributes["train_function"] = self

    def forget(self) -> None:
        """Build the measured functions anew before they are needed next."""
        self.steps, self._single = {}, None

    def disarm(self) -> None:
        """The user's function is back, for good."""
        self.active = False
        if self._attributes.get("train_function") is self:
            self._attributes["train_function"] = self._original
        self.forget()

    def __call__(self, iterator: Any) -> Any:
        """Train on the next batch or block."""
        original = self._original
        assert original is not None
        self._attributes["train_function"] = original
        if not self.active or self.model.history is not self._history:  # a later fit without us, after one that broke off
            return original(iterator)
        batches = self.model.steps_per_execution
        if self.guard or self.listener.due(self.step) or (batches > 1 and self.listener.due(self.step + batches - 1)):
            return self._pulled(iterator, batches)
        started = time.perf_counter()
        logs = original(iterator)
        ended = time.perf_counter()
        self.light_seconds += 0.1 * ((ended - started) / batches - self.light_seconds)
        self.step += batches
        try:
            self.listener.light(logs, batches)
        except Exception as error:
            self._failed(error)
        self.own_seconds += time.perf_counter() - ended
        return logs

    # ---- batch by batch

    def _pulled(self, iterator: Any, batches: int) -> Any:
        logs: Any = None
        original = self._original
        assert original is not None
        first = self.step
        for _ in range(batches):
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:  # the user's function ends the epoch the way it always does
                    return original(iterator)
                break
            full = self.active and self.listener.due(self.step)
            step = self._prepared(full, iterator) if self.active and (full or self.guard) else None
            if step is None:
                logs = self._one(batch, iterator)
                self.step += 1
            else:
                started = time.perf_counter()
                logs, outcome = step(batch)
                self.step += 1
                try:
                    self.listener.measured(logs, outcome, batch, full)
                except Exception as error:
                    self._failed(error)
                extra = max(0.0, time.perf_counter() - started - self.light_seconds)
                self.own_seconds += extra
                self.sampled_seconds += extra * full
            if self.model.stop_training:
                break
        if self.active and (batches > 1 or step is None):
            try:
                self.listener.light(logs, self.step - first)
            except Exception as error:
                self._failed(error)
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
        except Exception:  # the user's step may be at fault: then the user's own function raises the same below
            self.guard = False
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

    def _failed(self, error: Exception) -> None:
        from trainvet.action import TrainingAborted

        if isinstance(error, TrainingAborted):
            raise error
        self.listener.failed("reading a step")

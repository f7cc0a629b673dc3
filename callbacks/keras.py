"""The callback for Keras 3: ``model.fit(x, y, callbacks=[Diagnostics()])``, without a training loop of one's own."""

from __future__ import annotations

import copy
import glob
import re
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import keras

from trainvet.callbacks.diagnostics import Watching
from trainvet.callbacks.session import Session, guarded, switched_off
from trainvet.integrations.keras.evaluation import array_adapter
from trainvet.integrations.keras.facts import hyper_parameters
from trainvet.integrations.keras.probe import Fit, Probe

HOT = ("on_train_batch_begin", "on_test_batch_begin")
# the trainvet callbacks of the fit that is about to begin, by model: Keras tells a callback of the model, not of its neighbours
_together: weakref.WeakKeyDictionary[Any, list[Diagnostics]] = weakref.WeakKeyDictionary()


class Diagnostics(Watching, keras.callbacks.Callback):
    """Watches a training run: ``model.fit(..., callbacks=[Diagnostics()])``. The arguments are those of :class:`Watching`.

    Steps are batches. Several fits with one object continue its count. On TensorFlow; with other backends the report says that nothing is observed.
    """

    params: Any = None
    _model: Any = None
    _probe: Probe | None = None
    _earlier: Probe | None = None
    _owner: bool = False
    _begun: bool = False
    _spent: float = 0.0
    _companions: tuple[Any, ...] = ()
    _epochs: tuple[tuple[int, float], ...] = ()
    _data: tuple[bool | None, int | None] = (None, None)

    # ---- start and end

    def set_model(self, model: Any) -> None:
        """Keras builds its list of callbacks: note which of ours are in it."""
        super().set_model(model)
        if self._session is None or not self._session.alive:  # not the evaluation within a fit
            mine = _together.setdefault(model, [])
            if self in mine:
                mine.clear()
            mine.append(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """The first of our callbacks builds monitor and sinks for all of them."""
        mine = _together.pop(self.model, [])
        if switched_off() or not mine or mine[0] is not self:
            return
        self._data = _data()
        options, selection = copy.copy(self._options), copy.deepcopy(self._selection)
        for callback in mine[1:]:
            options.merge(callback._options)
            selection.merge(copy.deepcopy(callback._selection))
        self._companions = _companions()
        model = self.model
        session = Session(
            options,
            selection,
            default_dir=lambda: _logger_dir(self._companions),
            hyper_parameters={**hyper_parameters(model), **{key: value for key, value in (self.params or {}).items() if value is not None}},
            stop=lambda: setattr(model, "stop_training", True),
        )
        before, self._earlier = self._session, self._probe
        for callback in mine:
            callback._session, callback._owner, callback._probe = session, callback is self, None
        session.checkpoint = self._checkpoint
        self._begun, self._spent, self._epochs = False, 0.0, ()
        if before is not None and before.monitor.step and self._earlier is not None and self._earlier.model is model:
            session.monitor.load_state_dict(before.monitor.state_dict())

    def on_train_end(self, logs: Any = None) -> None:
        """Judge what is still on its way, and tell."""
        if self._owner and self._session is not None:
            self._drain()
            self._session.end()
            for hook in HOT:
                self.__dict__.pop(hook, None)

    @guarded
    def _drain(self) -> None:
        if self._probe is not None and self._session is not None:
            self._session.observe(self._probe.poll(drain=True))

    # ---- epochs and batches

    @guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The metrics were reset; at the first epoch the run begins."""
        session = self._session
        if not self._owner or session is None:
            return
        if not self._begun:
            self._begun = True
            self._start(session, epoch)
        if self._probe is not None:
            self._probe.begin_epoch(epoch)
            self._epochs = (*self._epochs, (self._probe.stepper.step, time.time()))

    def _start(self, session: Session, epoch: int) -> None:
        monitor, params = session.monitor, self.params or {}
        aborts = monitor.abort_on.level is not None or "NF101" in monitor.abort_on.codes
        self._probe = Probe(
            self.model,
            monitor,
            Fit(params.get("epochs"), params.get("steps"), epoch, self._companions, *self._data),
            latched=aborts,
            allowed=session.options.skip_bad_updates,
            step=monitor.step,
            applied=monitor.applied,
            after=self._judge,
            lost=session.abort,
            failed=session.fail,
            earlier=self._earlier,
        )
        self._earlier = None
        stepper = self._probe.stepper
        self.__dict__ |= dict(zip(HOT, (stepper.arm, stepper.tick), strict=True))  # without a detour: they are called at every batch
        session.begin(self._probe, monitor.step)

    def on_test_begin(self, logs: Any = None) -> None:
        """A validation follows the epoch's last batch and will reset the metrics."""
        self._close_epoch()
        self._evaluate(False)

    def on_test_end(self, logs: Any = None) -> None:
        """The validation is over."""
        self._evaluate(True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch's last batch is over, and so is its validation."""
        self._close_epoch()
        self._report_metrics(logs)

    @guarded
    def _evaluate(self, over: bool) -> None:
        if self._owner and self._probe is not None and self._session is not None:
            if over:
                self._probe.end_evaluation()
                self._session.observe(self._probe.poll())
            else:
                self._probe.begin_evaluation()

    @guarded
    def _report_metrics(self, logs: Any) -> None:
        if self._owner and self._probe is not None and self._session is not None:
            self._probe.metrics(logs)
            self._session.observe(self._probe.poll())

    @guarded
    def _close_epoch(self) -> None:
        if self._owner and self._probe is not None:
            self._probe.end_epoch()

    def _judge(self) -> None:
        if self._session is not None and self._probe is not None:
            spent = self._probe.stepper.own_seconds
            self._session.monitor.own_seconds += spent - self._spent
            self._spent = spent
            self._session.life()
            self._session.observe(self._probe.poll())

    def _checkpoint(self, good: int | None) -> str | None:
        """The newest file of a ModelCheckpoint that holds no step after ``good``: it was there when an epoch began that starts no later."""
        until = max([at for first, at in self._epochs if good is not None and first <= good + 1], default=0.0)
        kinds = [other for other in self._companions if isinstance(other, keras.callbacks.ModelCheckpoint)]
        found = [Path(name) for kind in kinds for name in glob.glob(re.sub(r"\{[^}]*\}", "*", str(kind.filepath)))]
        written = {path: path.stat().st_mtime for path in found if self._epochs}
        fine = [path for path, at in written.items() if self._epochs[0][1] <= at <= until]
        return str(max(fine, key=lambda path: written[path])) if fine else None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing that is alive travels in a copy or pickle."""
        kept = {name: value for name, value in super().__getstate__().items() if name not in HOT}
        return {**kept, "_probe": None, "_earlier": None, "_owner": False, "_model": None, "_companions": (), "_epochs": ()}


def _companions() -> tuple[Any, ...]:
    """The other callbacks of this fit. Keras does not hand them over; the list is the caller of ``on_train_begin``."""
    caller = sys._getframe(2).f_locals.get("self")
    return tuple(getattr(caller, "callbacks", ())) if isinstance(caller, keras.callbacks.CallbackList) else ()


def _data() -> tuple[bool | None, int | None]:
    """Where ``fit`` reads arrays: are they shuffled, and how many samples an epoch has. Keras hands neither over; ``fit`` holds the reader."""
    frame = sys._getframe(2).f_back
    iterator = frame.f_locals.get("epoch_iterator") if frame is not None else None
    adapter = array_adapter(iterator)
    shuffled, samples, size = (getattr(adapter, name, None) for name in ("_shuffle", "_num_samples", "_batch_size"))
    steps = getattr(iterator, "steps_per_epoch", None)
    if not isinstance(samples, int) or not isinstance(size, int):
        return None, None
    return shuffled if isinstance(shuffled, bool) else None, samples if not steps else min(samples, int(steps) * size)


def _logger_dir(companions: tuple[Any, ...]) -> Path | None:
    boards = [other for other in companions if isinstance(other, keras.callbacks.TensorBoard)]
    return Path(str(boards[0].log_dir)) if boards else None


class LearningRateSanity(Diagnostics):
    """The learning-rate rules only."""

    focus = ("LR",)


class LossScaleMonitor(Diagnostics):
    """The loss-scale rules only."""

    focus = ("LS", "NF102")


class GradientWatch(Diagnostics):
    """Gradients and non-finite values."""

    focus = ("GR", "NF")


class WeightWatch(Diagnostics):
    """Weights and their updates."""

    focus = ("WT",)


class ActivationWatch(Diagnostics):
    """Activations: dead and saturated units."""

    focus = ("AC",)


class DataWatch(Diagnostics):
    """Inputs and labels."""

    focus = ("IN",)

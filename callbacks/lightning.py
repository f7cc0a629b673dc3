"""The callback for Lightning's Trainer (``lightning`` and ``pytorch_lightning``)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainvet.action import TrainingAborted
from trainvet.callbacks.diagnostics import Options, Watching
from trainvet.callbacks.session import LOST, Session, guarded, switched_off
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.lightning import Replay, known_facts, last_checkpoint, scaler_of
from trainvet.integrations.torch.probe import Probe
from trainvet.recording import round_tables
from trainvet.report import Report
from trainvet.statistics import Snapshot

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

NO_STEP = "the trainer ran no training step, so nothing was watched"


class Diagnostics(Watching, Callback):
    """Watches a training run: ``Trainer(callbacks=[Diagnostics()])``. The arguments are those of :class:`Watching`."""

    _probe: Probe | None = None
    _owner: bool = False

    @property
    def state_key(self) -> str:
        """Distinguishes our callbacks from each other in a checkpoint, by what the user asked for: a catalogue that grew changes no key."""
        asked = [*(self._select if self._select != ("default",) else ()), *self._own]
        return f"trainvet.{type(self).__name__}" + (f"({', '.join(asked)})" if asked else "")

    # ---- start and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A run begins: nothing of it is known yet."""
        if stage != "fit":
            return
        if self._session is not None:
            self._last, self._state = self.report, self.state_dict()
        self._session, self._probe, self._owner = None, None, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build plan, probe and monitor: weights, optimizers and a restored step count are there now."""
        if switched_off():
            return
        mine = _ours(trainer)
        if mine[0] is not self:
            return
        options, selection = _join(mine)
        if options.abort == "stop" and (trainer.min_steps or trainer.min_epochs):
            warnings.warn('abort="stop" waits for min_steps and min_epochs of the Trainer; abort="raise" does not', stacklevel=2)
        session = Session(
            options,
            selection,
            default_dir=lambda: _logger_dir(trainer),
            hyper_parameters=dict(getattr(pl_module, "hparams", {}) or {}),
            writes=trainer.is_global_zero,
            stop=lambda: setattr(trainer, "should_stop", True),
        )
        for callback in mine:
            callback._session, callback._owner = session, callback is self
        session.checkpoint = lambda step: last_checkpoint(trainer, step)
        self._start(session, trainer, pl_module)

    def _start(self, session: Session, trainer: Any, pl_module: Any) -> None:
        try:
            step = trainer.global_step
            if self._state and self._state.get("step") == step:
                session.monitor.load_state_dict(self._state)
            options = session.options
            poison_aborts = session.monitor.abort_on.level is not None or "NF101" in session.monitor.abort_on.codes
            guard = Guard(poison_aborts, options.skip_bad_updates) if poison_aborts or options.skip_bad_updates else None
            self._replay = Replay(pl_module)
            self._probe = Probe(
                pl_module,
                trainer.optimizers,
                session.monitor,
                known=known_facts(trainer, pl_module),
                scaler=scaler_of(trainer),
                guard=guard,
                strict=options.strict,
                step=step,
                applied=session.monitor.applied or step,
                replay=self._replay,
            )
            session.begin(self._probe, step)
        except TrainingAborted:
            raise
        except Exception:
            session.fail("starting to measure failed")

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Judge what is still on its way, and tell."""
        if self._owner and self._probe is not None and self._session is not None:
            self._judge(self._session, self._probe.poll(drain=True))
            self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The run broke off: nothing of ours may stay, and the files are completed."""
        self._finish("failed", f"{type(exception).__name__}: {exception}", exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The last chance to leave nothing behind."""
        if stage == "fit":
            self._finish("finished", "")
            if self._session is None and not switched_off():
                self._last = Report(status="finished", reason=NO_STEP)
                if _ours(trainer)[0] is self:
                    warnings.warn(f"trainvet: {NO_STEP}", stacklevel=2)

    def _finish(self, status: str, reason: str, exception: BaseException | None = None) -> None:
        session = self._session
        if session is None or not self._owner or session.monitor.status != "running":
            return
        try:
            if self._probe is not None and session.alive:
                for snapshot in self._probe.broken(exception):
                    session.monitor.observe(round_tables(snapshot))
        except Exception:
            session.monitor.failed("reading the last steps failed")
        session.end(status, reason)

    # ---- the step

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The forward begins."""
        if self._owner and self._probe is not None:
            self._replay.keep(batch, batch_idx, self._probe.step)
            self._probe.forward(batch, batch_idx, trainer.current_epoch)

    @guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The loss is known; Lightning has divided it by the number of accumulated batches and multiplied it by the loss scale."""
        if self._owner and self._probe is not None:
            self._probe.loss(loss, float(trainer.accumulate_grad_batches) if pl_module.automatic_optimization else 1.0, scaled=True)

    @guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are complete and not yet clipped."""
        session, probe = self._session, self._probe
        if not self._owner or probe is None or session is None:
            return
        raw = getattr(optimizer, "_optimizer", optimizer)
        self._judge(session, probe.gradients(raw))

    @guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Weights have moved."""
        if self._owner and self._probe is not None and self._session is not None:
            self._probe.updated()
            self._judge(self._session, self._probe.poll())

    def _judge(self, session: Session, snapshots: list[Snapshot]) -> None:
        session.observe(snapshots)
        if self._probe is not None and self._probe.lost and session.monitor.status == "running":
            session.abort(LOST)

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Finetuning callbacks change the plan here."""
        if self._owner and self._probe is not None and self._session is not None and self._probe.refresh():
            self._session.begin(self._probe, self._probe.step)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: survives ``torch.load(weights_only=True)``."""
        session = self._session
        if session is None or not self._owner:
            return {}
        self._catch_up()
        try:
            return session.monitor.state_dict()
        except Exception:
            session.fail("saving the state failed")
            return {}

    @guarded
    def _catch_up(self) -> None:
        """Judge everything measured so far: a checkpoint belongs to this very step, and is not to be written over by a run that is to end."""
        if self._probe is not None and self._session is not None:
            self._judge(self._session, self._probe.poll(drain=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Kept until the training starts, when the restored step count is known."""
        self._state = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing that is alive travels in a copy or pickle."""
        return {**super().__getstate__(), "_probe": None, "_replay": None, "_owner": False}


def _join(callbacks: list[Diagnostics]) -> tuple[Options, Any]:
    import copy

    options, selection = copy.copy(callbacks[0]._options), copy.deepcopy(callbacks[0]._selection)
    for callback in callbacks[1:]:
        options.merge(callback._options)
        selection.merge(copy.deepcopy(callback._selection))
    return options, selection


def _ours(trainer: Any) -> list[Diagnostics]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Diagnostics)]


def _logger_dir(trainer: Any) -> Path | None:
    """The logger's own directory. Not ``trainer.log_dir``: that is a collective call, and only one rank writes."""
    directory = getattr(trainer.logger, "log_dir", None) or getattr(trainer.logger, "save_dir", None)
    return Path(directory) if isinstance(directory, str | Path) and str(directory) else None


class LearningRateSanity(Diagnostics):
    """The learning-rate rules only."""

    focus = ("LR",)


class LossScaleMonitor(Diagnostics):
    """The loss-scale rules only."""

    focus = ("LS",)


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

"""The callback for Lightning's Trainer (``lightning`` and ``pytorch_lightning``)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainvet.action import TrainingAborted
from trainvet.callbacks.diagnostics import Options, Watching
from trainvet.callbacks.session import LOST, Session, guarded, switched_off
from trainvet.integrations.torch.fingerprint import Fingerprints
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.lightning import (
    Replay,
    averaging,
    fresh_metrics,
    known_facts,
    last_checkpoint,
    numbers,
    scaler_of,
)
from trainvet.integrations.torch.probe import Probe
from trainvet.recording import round_tables
from trainvet.report import Report
from trainvet.statistics import Snapshot, Track

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
    _trained: Fingerprints | None = None
    _epoch_metrics: Mapping[str, float] | None = None

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
        self._session, self._probe, self._owner, self._trained, self._epoch_metrics = None, None, False, None, None

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
            self._trained = Fingerprints() if "run.other_weights" in session.monitor.keys and not averaging(trainer) else None
        except TrainingAborted:
            raise
        except Exception:
            session.fail("starting to measure failed")

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Judge what is still on its way, and tell."""
        if self._owner and self._probe is not None and self._session is not None:
            self._late_metrics(trainer)
            self._judge(self._session, self._probe.poll(drain=True))
            self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The run broke off: nothing of ours may stay, and the files are completed."""
        self._finish("failed", f"{type(exception).__name__}: {exception}", exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The last chance to leave nothing behind."""
        if stage == "fit":
            self._finish("finished", "")
            self._keep_weights(pl_module)
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

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Of interest where batches are accumulated."""
        if self._owner and trainer.accumulate_grad_batches > 1:
            self._accumulated()

    @guarded
    def _accumulated(self) -> None:
        if self._probe is not None:
            self._probe.after_backward()

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
        if not self._owner or self._probe is None or self._session is None:
            return
        self._late_metrics(trainer)
        self._probe.pace.spoil()
        if self._probe.refresh():
            self._session.begin(self._probe, self._probe.step)

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The epoch's metrics are there, but for those that the module logs in this very hook, after us."""
        if self._owner and self._probe is not None and self._session is not None:
            self._judge(self._session, self._probe.evaluation_over(fresh_metrics(trainer)))
            self._epoch_metrics = numbers(trainer.callback_metrics)

    def _late_metrics(self, trainer: Any) -> None:
        """What was logged since the epoch's end."""
        before, self._epoch_metrics = self._epoch_metrics, None
        if before is not None and self._probe is not None and self._session is not None:
            now = numbers(trainer.callback_metrics)
            late = {name: value for name, value in now.items() if name not in before or (value != before[name] and value == value)}
            if late:
                self._judge(self._session, self._probe.evaluation_over(late))

    # ---- evaluations

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation begins; the sanity check before the training is none."""
        if self._owner and self._probe is not None and not trainer.sanity_checking:
            self._probe.pace.leave()

    @guarded
    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The first batches are looked at."""
        if self._owner and self._probe is not None and not trainer.sanity_checking:
            self._probe.evaluations.start()

    @guarded
    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing of ours stands between two batches."""
        if self._owner and self._probe is not None and not trainer.sanity_checking:
            self._probe.evaluations.pause()

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What was seen, and the metrics."""
        if self._owner and self._probe is not None and self._session is not None and not trainer.sanity_checking:
            self._probe.pace.back()
            self._judge(self._session, self._probe.evaluation_over(fresh_metrics(trainer)))

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Are the weights under test those that were trained?"""
        self._compare_weights(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Likewise."""
        self._compare_weights(trainer, pl_module)

    def _keep_weights(self, module: Any) -> None:
        if self._trained is not None and self._session is not None:
            try:
                self._trained.keep(module)
            except Exception:
                self._trained = None
                self._session.monitor.failed("keeping a checksum of the weights failed")

    def _compare_weights(self, trainer: Any, module: Any) -> None:
        """The fit of this very callback is over; its files are closed, and its report goes on."""
        session = self._session
        if session is None or self._trained is None or not self._owner:
            return
        monitor = session.monitor
        try:
            strange = False if trainer.ckpt_path else self._trained.strange(module)
            if strange is None:
                return
            count = len(monitor.report.findings)
            at = np.array([max(0, monitor.step - 1)])
            track = Track(at, np.array([monitor.applied]), np.array([float(strange)]))
            monitor.observe(Snapshot(int(at[0]), monitor.applied, series={"run.other_weights": {"run": track}}))
            if strange and len(monitor.report.findings) > count:
                warnings.warn("trainvet: the weights under test are neither those of the fit nor those of one of its checkpoints", stacklevel=2)
        except Exception:
            monitor.failed("comparing the weights under test failed")

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: survives ``torch.load(weights_only=True)``."""
        session = self._session
        if session is None or not self._owner:
            return {}
        self._catch_up()
        if self._probe is not None and self._probe.module is not None and session.alive:
            self._keep_weights(self._probe.module)
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
            self._probe.pace.spoil()  # writing the file takes its time

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Kept until the training starts, when the restored step count is known."""
        self._state = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing that is alive travels in a copy or pickle."""
        return {**super().__getstate__(), "_probe": None, "_replay": None, "_owner": False, "_trained": None}


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

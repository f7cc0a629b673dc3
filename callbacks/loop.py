"""For a hand-written PyTorch loop: ``with watch(model, optimizer) as vet: … vet.step(loss)``."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainvet.action import TrainingAborted
from trainvet.callbacks.diagnostics import Watching
from trainvet.callbacks.session import LOST, Session, guarded, switched_off
from trainvet.finding import Finding
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.plan import group_labels
from trainvet.integrations.torch.probe import Known, Probe
from trainvet.integrations.torch.schedules import Driven, simulate
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


class Watch(Watching):
    """Watches a loop between ``__enter__`` and ``__exit__``; made by :func:`watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scaler: Any = None,
        scheduler: Any = None,
        steps: int | None = None,
        steps_per_epoch: int = 0,
        scheduler_interval: str = "step",
        hyper_parameters: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """See :func:`watch`."""
        super().__init__(**arguments)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model={type(model).__name__} must be a torch.nn.Module")
        if steps is not None and steps < 1:
            raise ValueError(f"steps={steps!r}: a run without steps has nothing to watch")
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not self._optimizers or not all(isinstance(item, torch.optim.Optimizer) for item in self._optimizers):
            raise ValueError("optimizer must be a torch optimizer, or several")
        if scheduler_interval not in ("step", "epoch"):
            raise ValueError(f'scheduler_interval={scheduler_interval!r} must be "step" or "epoch"')
        self._scaler = scaler
        self._driven = None if scheduler is None else Driven(scheduler, scheduler_interval)
        self._steps, self._steps_per_epoch = steps, steps_per_epoch
        self._hyper_parameters = hyper_parameters
        self._probe: Probe | None = None
        self._guard: Guard | None = None
        self._handles: list[Any] = []
        self._replay = _Replay(model)
        self._open = self._judged = self._inside = False
        self._batch = 0
        self._epoch = 0
        self.stopped = False

    def __enter__(self) -> Watch:
        """Start watching."""
        if switched_off():
            return self
        self._session = Session(
            self._options,
            self._selection,
            default_dir=lambda: None,
            hyper_parameters=self._hyper_parameters,
            stop=lambda: setattr(self, "stopped", True),
        )
        try:
            self._start(self._session)
        except TrainingAborted:
            self._leave("aborted", "")
            raise
        except Exception:
            self._session.fail("starting to measure failed")
        return self

    def _start(self, session: Session) -> None:
        options = session.options
        aborts = session.monitor.abort_on.level is not None or "NF101" in session.monitor.abort_on.codes
        self._guard = Guard(aborts, options.skip_bad_updates) if aborts or options.skip_bad_updates else None
        schedules = []
        if self._driven is not None and self._steps is not None and (self._driven.interval == "step" or self._steps_per_epoch):
            labels = {id(optimizer): names for optimizer, names in zip(self._optimizers, group_labels(self._optimizers), strict=True)}
            driven = labels.get(id(self._driven.scheduler.optimizer), ())
            schedules = simulate(self._driven, driven, self._steps, self._steps_per_epoch, self._model)
        known = Known("torch", self._steps, tuple(schedules), manual_optimization=len(self._optimizers) > 1, **process_facts())
        self._probe = Probe(
            self._model,
            self._optimizers,
            session.monitor,
            known=known,
            scaler=self._scaler,
            guard=self._guard,
            strict=options.strict,
            replay=self._replay,
        )
        session.begin(self._probe)
        self._handles = [self._model.register_forward_pre_hook(self._forward, with_kwargs=True)]
        self._handles += [optimizer.register_step_pre_hook(self._stepping) for optimizer in self._optimizers]
        self._handles += [optimizer.register_step_post_hook(self._stepped) for optimizer in self._optimizers]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Judge what is still on its way, tell, and leave nothing behind."""
        if kind is None:
            self._leave("finished", "")
        else:
            self._leave("failed", f"{kind.__name__}: {error}", error)

    def _leave(self, status: str, reason: str, error: BaseException | None = None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        session = self._session
        if session is None or session.monitor.status != "running":
            return
        if self._probe is not None and session.alive:
            try:
                last = self._probe.broken(error)
                self._probe.updated()
                self._tell(session, [*last, *self._probe.poll(drain=True)])
            except TrainingAborted:
                raise
            except Exception:
                session.monitor.failed("reading the last steps failed")
        session.end(status, reason)

    # ---- what the loop calls

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """After ``loss.backward()`` (and ``scaler.unscale_``, if used) and before clipping and ``optimizer.step()``.

        ``optimizer`` says which one steps next, when there are several. Raises TrainingAborted when the user asked for that.
        """
        self._judge(loss, optimizer or self._optimizers[0])

    def epoch(self, number: int) -> None:
        """Which epoch it is; only shown, never needed."""
        self._epoch = number

    @guarded
    def _judge(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        session, probe = self._session, self._probe
        if session is None or probe is None:
            return
        if not self._open:  # the forward did not show: hooks of a compiled module may not run
            self._open = True
            probe.forward(((), {}), self._batch, self._epoch, self._model)
        self._judged = True
        probe.loss(loss)
        self._tell(session, probe.gradients(optimizer))

    def _tell(self, session: Session, snapshots: list[Snapshot]) -> None:
        session.observe(snapshots)
        if self._probe is not None and self._probe.lost and session.monitor.status == "running":
            session.abort(LOST)

    # ---- hooks on the model and the optimizers

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and module.training and torch._C._current_graph_task_id() == -1 and not self._replay.running:
            self._begin(args, kwargs)
        elif not (module.training and torch.is_grad_enabled()) and not self._replay.running:
            self._elsewhere()

    @guarded
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._probe is None:
            return
        if self._judged and not self._inside:  # the step before this forward was skipped (by a loss scaler): the optimizer did not tell
            self._end_step()
        self._replay.keep(args, kwargs, self._batch, self._probe.step)
        if not self._open:
            self._open = True
            self._probe.forward((args, kwargs), self._batch, self._epoch, self._model)
        else:
            self._probe.pace.again()

    @guarded
    def _elsewhere(self) -> None:
        """The model is called, but not for training: how long the loop stays away from it is not known."""
        if self._probe is not None and not self._inside:
            self._probe.pace.spoil()

    @guarded
    def _about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._probe is not None and self._judged:
            self._probe.stepping(optimizer)

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._about_to_step(optimizer)
        self._inside = True  # a forward in here is a further evaluation of the same step

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._inside = False
        self._close()

    @guarded
    def _close(self) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._probe is None or self._session is None:
            return
        self._open = self._judged = False
        self._batch += 1
        self._probe.updated()
        self._tell(self._session, self._probe.poll())


def process_facts() -> dict[str, Any]:
    """What torch itself says of the process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {"deterministic": torch.are_deterministic_algorithms_enabled(), "processes": torch.distributed.get_world_size() if distributed else 1}


class _Replay:
    """Calls the model once more with the inputs of a step; there is no loss, since only the loop knows it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.depth = 1
        self.running = False
        self._kept: deque[tuple[int, int, tuple[Any, ...], dict[str, Any], Tensor]] = deque()

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, step: int) -> None:
        """References to the inputs of a call that belongs to ``step``."""
        while self._kept and self._kept[0][0] <= step - self.depth:
            self._kept.popleft()
        if self.depth:
            self._kept.append((step, batch, args, kwargs, torch.get_rng_state()))

    def runs(self, step: int) -> list[tuple[int, Callable[[], Tensor | None]]]:
        """One call per forward of ``step``."""
        return [(batch, partial(self._run, args, kwargs, rng)) for at, batch, args, kwargs, rng in self._kept if at == step]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Tensor) -> None:
        self.running = True
        try:
            torch.set_rng_state(rng)
            self.model(*args, **kwargs)
        finally:
            self.running = False


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    scaler: Any = None,
    scheduler: Any = None,
    steps: int | None = None,
    steps_per_epoch: int = 0,
    scheduler_interval: str = "step",
    hyper_parameters: dict[str, Any] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    select: Sequence[str] = ("default",),
    ignore: Sequence[str] = (),
    settings: dict[str, dict[str, Any]] | None = None,
    rules: Sequence[Rule] = (),
    every: int | Literal["auto"] = "auto",
    profile: str | None = None,
    expect: dict[str, float] | None = None,
    abort_on: str | Sequence[str] | None = None,
    abort: Literal["raise", "stop"] = "raise",
    skip_bad_updates: int = 0,
    strict: bool = False,
    on_finding: Callable[[Finding], None] | None = None,
) -> Watch:
    """Watch a hand-written loop.

    Args:
        model: the module whose call is the forward pass.
        optimizer: the optimizer, or several.
        scaler: the ``torch.amp.GradScaler``, if one is used.
        scheduler: a torch scheduler; with ``steps`` it is driven ahead to the end of the run, stepped per ``scheduler_interval``.
        steps: planned optimizer steps, where known.
        steps_per_epoch: optimizer steps per epoch, for schedulers that are stepped per epoch.
        scheduler_interval: "step" or "epoch".
        hyper_parameters: recorded with the environment.

    The other arguments are those of :class:`trainvet.callbacks.diagnostics.Watching`. With abort="stop" the loop is to look at ``vet.stopped``.
    """
    arguments = {
        "log_dir": log_dir, "select": select, "ignore": ignore, "settings": settings, "rules": rules, "every": every, "profile": profile,
        "expect": expect, "abort_on": abort_on, "abort": abort, "skip_bad_updates": skip_bad_updates, "strict": strict, "on_finding": on_finding,
    }  # fmt: skip
    return Watch(
        model,
        optimizer,
        scaler=scaler,
        scheduler=scheduler,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        scheduler_interval=scheduler_interval,
        hyper_parameters=hyper_parameters,
        **arguments,
    )

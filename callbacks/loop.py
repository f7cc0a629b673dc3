"""For a hand-written PyTorch loop: ``with watch(model, optimizer) as vet: … vet.step(loss)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainvet.action import TrainingAborted
from trainvet.callbacks.diagnostics import Watching
from trainvet.callbacks.session import Session, guarded, switched_off
from trainvet.finding import Finding
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.probe import Known, Probe
from trainvet.integrations.torch.schedules import Driven, simulate
from trainvet.rule import Rule


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
        self._scaler = scaler
        self._driven = None if scheduler is None else Driven(scheduler, scheduler_interval)
        self._steps, self._steps_per_epoch = steps, steps_per_epoch
        self._hyper_parameters = hyper_parameters
        self._probe: Probe | None = None
        self._guard: Guard | None = None
        self._handles: list[Any] = []
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._open = False
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
        if self._driven is not None and self._steps is not None:
            labels = [str(group.get("name") or "") for group in self._optimizers[0].param_groups]
            stem = type(self._optimizers[0]).__name__
            labels = [label or (stem if len(labels) == 1 else f"{stem}/{index}") for index, label in enumerate(labels)]
            schedules = simulate(self._driven, labels, self._steps, self._steps_per_epoch, self._model)
        known = Known("torch", self._steps, tuple(schedules), manual_optimization=len(self._optimizers) > 1)
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
        elif not issubclass(kind, TrainingAborted):
            self._leave("failed", f"{kind.__name__}: {error}")

    def _leave(self, status: str, reason: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._inputs = [], None
        session = self._session
        if session is None or session.monitor.status != "running":
            return
        if self._probe is not None and session.alive:
            try:
                self._probe.updated()
                session.observe(self._probe.poll(drain=True))
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
        probe.loss(loss)
        session.observe(probe.gradients(optimizer))
        if probe.lost and session.monitor.status == "running":
            session.abort("the update is not finite and is held back; no more bad updates are allowed")

    # ---- hooks on the model and the optimizers

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and module.training and torch._C._current_graph_task_id() == -1:
            self._begin(args, kwargs)

    @guarded
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._probe is None:
            return
        self._inputs = (args, kwargs)
        if not self._open:
            self._open = True
            self._probe.forward((args, kwargs), self._batch, self._epoch, self._model)

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer steps: from here on another forward belongs to the next step."""

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._close()

    @guarded
    def _close(self) -> None:
        if self._probe is None or self._session is None:
            return
        self._open = False
        self._batch += 1
        self._probe.updated()
        self._session.observe(self._probe.poll())

    def _replay(self) -> Tensor | None:
        if self._inputs is None:
            return None
        self._model(*self._inputs[0], **self._inputs[1])
        return None


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

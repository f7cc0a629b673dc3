"""Measures one training run in PyTorch: what the edges (Lightning, a plain loop) call at the marked places of a step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainvet.finding import Finding
from trainvet.integrations.torch import host, kernels
from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.cycle import Cycle, cells, clipped
from trainvet.integrations.torch.evaluations import Evaluations, aside
from trainvet.integrations.torch.evidence import early, late
from trainvet.integrations.torch.forensics import locate
from trainvet.integrations.torch.guard import Guard, device_side
from trainvet.integrations.torch.known import TOLD, unmeasured
from trainvet.integrations.torch.known import Known as Known
from trainvet.integrations.torch.loss_scale import LossScale
from trainvet.integrations.torch.pace import KEYS, Pace
from trainvet.integrations.torch.plan import Plan, number
from trainvet.integrations.torch.readback import Readback
from trainvet.integrations.torch.rows import Rows
from trainvet.integrations.torch.sampling import Sampling
from trainvet.monitor import Monitor
from trainvet.statistics import Facts, Snapshot, Vector

LAG = 10  # steps a row may be late: the slots of the ring, and two


class Replay(Protocol):
    """What the edge offers to locate a fault."""

    depth: int

    def runs(self, step: int) -> list[tuple[int, Callable[[], Tensor | None]]]:
        """For each batch of ``step`` that is kept, its index and a call that runs it once more and returns its loss, if there is one."""


class Probe:
    """Measures on the device and reads rows back later; on CPU (or ``strict``) the decisive numbers are read before the update.

    Order of calls in a step: :meth:`forward`, :meth:`loss` (per micro-batch), :meth:`gradients` and :meth:`updated` (per optimizer step),
    :meth:`poll`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        monitor: Monitor,
        *,
        known: Known | None = None,
        scaler: Any = None,
        guard: Guard | None = None,
        strict: bool = False,
        before_update: bool | None = None,
        step: int = 0,
        applied: int | None = None,
        replay: Replay | None = None,
    ) -> None:
        """``before_update``: read the loss and the norms before the update; None: where that costs nothing (all on CPU), or ``strict``."""
        self.module = module
        self.monitor = monitor
        self.known = known or Known()
        self.scaler = LossScale(scaler)
        self.guard = guard
        self.replay = replay
        self.step = step
        self.plan = Plan(module, optimizers)
        self.sampling = Sampling(self.plan, monitor)
        self.rows = Rows(step if applied is None else applied)
        self.pace = Pace(self.known.processes, self.known.waits)
        self.cycle = Cycle()
        self._readback: Readback[Attempt] = Readback()
        self._batch: Any = None
        self._index = self._epoch = 0
        self._sampled: bool | None = None
        self._micro: list[Tensor] = []
        self._in_forward = False
        self._pending: Attempt | None = None
        self._stepped: set[int] = set()
        self._few = 0
        self._since: float | None = None
        self._snapshots: list[Snapshot] = []
        on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        self._before_update = (on_cpu or strict) if before_update is None else before_update
        self._compiled = compiled(module)
        self.evaluations = Evaluations(module, monitor, lambda: None if self._compiled or self.sampling.blind else self.plan.modules)
        if not self._before_update:
            self._expect_lag()

    def _expect_lag(self) -> None:
        """Rows arrive some steps late: what an alarm needs is kept that long, or it is said what cannot be done."""
        if self.replay is not None:
            self.replay.depth = LAG if self.guard is not None and self.guard.latched and self.replay.depth else 0
        if self.guard is not None:
            self.guard.depth = LAG
            late = [owned.label for owned in self.plan.owned if not device_side(owned)]
            if late and not self.scaler:
                self.monitor.note(
                    f"a bad update of {', '.join(late)} reaches the weights before it is known to be bad: only fused Adam, AdamW, SGD and Adagrad "
                    "can hold it on the device; strict=True waits for the device before every update"
                )

    @property
    def sampled_seconds(self) -> float:
        """Time spent on full statistics."""
        return self.sampling.seconds

    # ---- facts

    def facts(self) -> Facts:
        """The plan as it stands."""
        unobservable = dict(self.known.unobservable)
        if self._compiled or self.sampling.blind:
            reason = self.sampling.blind or "the module is compiled: hooks attached now would not run"
            unobservable |= dict.fromkeys(("activation", "input", "label", "output", "module", "validation_input", "validation_module"), reason)
        if self.sampling.hidden_attention:
            reason = "attention computes its softmax inside one call (scaled_dot_product_attention, nn.MultiheadAttention)"
            unobservable |= {"activation.entropy": reason, "activation.input_abs_max": reason}
        unobservable |= unmeasured(self.known, len(self.plan.owned), alone())
        if not self.scaler:
            unobservable |= dict.fromkeys(("run.loss_scale", "gradient.underflow_share"), "no loss scaler in use")
            if self.guard is None:
                unobservable |= {"run.skipped": "no loss scaler in use, and no guard was asked for"}
        return Facts(
            framework=self.known.framework,
            subjects=(*self.plan.subjects(), *self.sampling.subjects()),
            planned_steps=self.known.planned_steps,
            optimizers=self.plan.optimizer_facts(),
            schedules=self.known.schedules,
            losses=tuple(self.sampling.losses.values()),
            precision=self.known.precision,
            loss_scaler=bool(self.scaler),
            growth_interval=self.scaler.growth_interval,
            clipping=self.known.clipping,
            clipping_by=self.known.clipping_by,
            accumulation=self.known.accumulation,
            every_step=True,
            **{name: getattr(self.known, name) for name in TOLD},
            **self.sampling.structure.facts(),
            balanced=self.known.balanced or any(loss.weighted for loss in self.sampling.losses.values()),
            profile="gan" if self.known.manual_optimization and len(self.plan.optimizers) > 1 else "",
            unobservable=unobservable,
        )

    def refresh(self) -> bool:
        """Rebuild the plan if parameters joined, left, froze or thawed; True when they did."""
        if not self.plan.changed():
            return False
        self.plan = self.plan.again()
        self.sampling.replan(self.plan)
        return True

    # ---- the step, in order

    def forward(self, batch: Any, index: int, epoch: int, inside: nn.Module | None = None) -> None:
        """A training forward begins: on sampled steps the look goes on. All optimizer steps of one batch are sampled together.

        ``inside``: the module whose call has begun already (a loop in which its pre-hook tells).
        """
        self._batch, self._index, self._epoch = batch, index, epoch
        self._stepped.clear()
        if self.guard is not None and not self._micro:
            self.guard.before_forward(self.module, self.step)
        self._sampled, self._in_forward = self.monitor.due(self.step), True
        keys = self.monitor.keys
        if not KEYS.isdisjoint(keys):
            self.pace.batch(batch, self._own())
        if self._sampled and not self._micro and "run.stale_gradient" in keys and len(self.plan.owned) == 1:
            self.cycle.begin(self.plan.owned[0])
        if self._sampled and not self._compiled:
            self.sampling.look(self.monitor.keys, inside, again=not self._micro)

    def loss(self, value: Tensor, factor: float = 1.0, scaled: bool = False) -> None:
        """A loss is about to be differentiated; ``factor`` undoes the trainer's division by accumulation steps, ``scaled`` says that the loss
        scaler has multiplied it already."""
        self.sampling.pause(more=self.known.manual_optimization)
        if self._sampled:
            self.sampling.structure.loss(value)
        self._in_forward = False
        value = value.detach()
        scale = self.scaler.scale() if scaled else None
        if scale is not None:
            value = value / scale.to(value.device)
        self._micro.append(value if factor == 1.0 else value * factor)

    def after_backward(self) -> None:
        """A backward is done. Of a sampled step that accumulates, the first micro-batch's gradient is measured."""
        if self._sampled and len(self._micro) == 1 and len(self.plan.owned) == 1 and "run.noise_scale" in self.monitor.keys:
            self.cycle.first_micro_batch(self.plan.owned[0])
            self._few = self.pace.first

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step, and gradients are as it is given them (an edge without closures)."""
        attempt = self._pending
        if attempt is None or not attempt.sampled or attempt.owned.optimizer is not optimizer or attempt.run.get("norm_after") is not None:
            return
        if "run.clip_scale" in self.monitor.keys and not (attempt.scaled and attempt.owned.fused):
            clipped(attempt)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Snapshot]:
        """The gradients of one optimizer step are complete, unscaled if they ever are, not yet clipped.

        Returns what must be judged before the update: a snapshot when the loss or a gradient is not finite and nobody else skips the step.
        """
        owned = next((item for item in self.plan.owned if item.optimizer is optimizer), None)
        if owned is None:
            return []
        if id(optimizer) in self._stepped and (not self.known.manual_optimization or isinstance(optimizer, torch.optim.LBFGS)):
            self._micro = []  # a further evaluation of the same step
            return []
        self._stepped.add(id(optimizer))
        self._finish()
        if not self._micro and all(parameter.grad is None for parameter in owned.tensors):
            self.step += 1  # the trainer counts a batch without a loss, but there is nothing to see
            return []
        sampled = self.monitor.due(self.step) if self._sampled is None else self._sampled
        if (sampled or len(optimizer.param_groups) != len(owned.group_labels)) and self.refresh():
            owned = next(item for item in self.plan.owned if item.optimizer is optimizer)
        attempt = Attempt(self.step, self._index, self._epoch, owned, sampled, rates(optimizer, self._before_update))
        self.step += 1
        self._pending = attempt
        gradients = [parameter.grad for parameter in owned.tensors]
        measured = host.norms_at_once(gradients) if self._before_update else None
        if measured is None:
            attempt.norms = kernels.norms(gradients)
        elif sampled or self.scaler:
            attempt.norms = torch.from_numpy(measured)
        attempt.losses, self._micro = self._micro, []
        if sampled:
            attempt.run["micro_batches"] = float(len(attempt.losses))
            self.cycle.gradients(attempt)
        if self.scaler:
            self._read_scale(attempt)
        urgent: list[Snapshot] = []
        if self._before_update:
            attempt.read(measured)
            if not attempt.finite and not self.scaler:
                attempt.bad, attempt.sampled = True, False
                urgent = self._alarm(attempt, gradients)
        elif self.guard is not None and not self.scaler and device_side(owned):
            self.guard.arm(owned, attempt.head().sum())
            attempt.armed = True
        if attempt.sampled:
            self.monitor.schedule.sampled(attempt.step)  # the monitor may hear of it some steps later
            self.sampling.gradients(attempt, gradients)
        return urgent

    @property
    def lost(self) -> bool:
        """Was an update held by the guard, and no more such updates are allowed?"""
        return self.guard is not None and self.guard.exhausted

    def updated(self) -> None:
        """The batch is over: weights have moved, or the step was skipped."""
        self._since = time.perf_counter()
        self.sampling.pause()
        self._in_forward = False
        self._finish(over=True)
        self.pace.idle(self._own())
        self._since = None
        self._stepped.clear()
        if self.guard is not None:
            self.guard.disarm()

    # ---- an evaluation between two steps

    def evaluation_over(self, metrics: Mapping[str, float]) -> list[Snapshot]:
        """The evaluation (or an epoch) is over, with these metrics: everything before it, and then it."""
        tables = self.evaluations.stop()
        told = metrics if "metric.value" in self.monitor.keys else {}
        if not tables and not told:
            return []
        ready, step = self.poll(drain=True), max(0, self.step - 1)
        return [*ready, aside(step, self.rows.applied, self._index, self._epoch, tables, told)]

    def poll(self, drain: bool = False) -> list[Snapshot]:
        """Snapshots that are complete; ``drain`` waits for the device and empties the rows."""
        if self._readback.flying:
            for values, attempt in self._readback.poll(wait=drain):
                self._arrived(attempt, values)
        if len(self.rows) >= self.block or drain:
            self._flush()
        ready, self._snapshots = self._snapshots, []
        return ready

    def broken(self, error: BaseException | None) -> list[Snapshot]:
        """The user's code raised: all snapshots, and, where it was the forward that did, what was handed over before that as a last one."""
        ready = self.poll(drain=True)
        if self._pending is not None or not isinstance(error, Exception):
            return ready
        arguments = self._batch if self.known.framework == "torch" else None
        tables = self.sampling.broken(error if self._in_forward else None, arguments)
        if tables:
            self.monitor.begin(self.facts(), self.step)
            self.sampling.news = False
            ready.append(Snapshot(self.step, self.rows.applied, self._index, self._epoch, tables))
        return ready

    @property
    def block(self) -> int:
        """Rows after which they are handed over although no sample is due."""
        return max(16, self.monitor.schedule.interval // 2)

    def locate(self, finding: Finding) -> Finding:
        """The finding with the module in which the value was born, where a replay of the batch shows it."""
        reached = "weights" in finding.evidence  # then it is too late for a replay
        if self.replay is None or reached or any(name.split(".")[0] in ("input", "label") for name in finding.subjects):
            return finding
        runs = self.replay.runs(finding.step) if alone() else []
        origin, batch = None, self._index
        for index, run in runs:
            origin, batch = locate(self.module, run), index
            if origin is not None:
                break
        if origin is None:
            told = "the fault did not come back when the batch was run again" if runs else self._why_no_replay()
            return dataclasses.replace(finding, evidence={**finding.evidence, "replay": told})
        fed = "" if math.isnan(origin.low) else f" from finite input in [{origin.low:.4g}, {origin.high:.4g}]"
        what = f"made by {'the loss' if origin.place == 'loss' else f'{origin.place} ({origin.kind})'}{fed}"
        if origin.kind == "input":
            what = f"in the {'batch' if origin.place == 'input' else f'input of {origin.place}'}: it was made outside all modules"
        return dataclasses.replace(
            finding,
            subjects=(origin.place,),
            where=origin.place,
            message=f"first non-finite value in the {origin.direction} pass, {what}, batch {batch}",
            evidence={**finding.evidence, "batch": batch, "input_min": origin.low, "input_max": origin.high},
        )

    def _why_no_replay(self) -> str:
        if not alone():
            return "the batch was not run again: several processes train together, and one that runs alone may wait for the others for ever"
        if self.known.manual_optimization:
            return "the batch was not run again: training_step steps the optimizers by itself"
        if not self._before_update and (self.guard is None or not self.guard.latched):
            return "the batch was not run again: weights have moved since"
        return "the batch was not run again: it was no longer kept"

    def close(self) -> None:
        """Everything of ours is removed from the user's objects."""
        self.sampling.stop()
        self.cycle.stop()
        self.evaluations.close()
        if self.guard is not None:
            self.guard.disarm()
        self._batch, self._micro, self.replay = None, [], None

    # ---- inside

    def _read_scale(self, attempt: Attempt) -> None:
        attempt.scaled = not self.scaler.unscaled(attempt.owned.optimizer)
        attempt.overflow = self.scaler.overflow(attempt.owned.optimizer)
        scale = self.scaler.scale()
        attempt.scale = torch.ones(()) if scale is None else scale

    def _finish(self, over: bool = False) -> None:
        """The update of the pending attempt is done: measure what follows it and send the row. ``over``: the batch is over too."""
        attempt, self._pending = self._pending, None
        if attempt is None:
            return
        keys = self.monitor.keys
        if not KEYS.isdisjoint(keys):
            few = self._few
            attempt.run |= {key: value for key, value in self.pace.step(self._own()).items() if key in keys or key == "run.batch_size"}
            if few:
                attempt.run["few"] = float(few)
        self._few = 0
        if attempt.bad:
            return
        if attempt.sampled:
            if self._clips_unseen(attempt):
                clipped(attempt)
            self.sampling.updated(attempt, self._batch, over)
        elif attempt.known:
            self._row(attempt, attempt.changed)
            return
        self._readback.send(attempt.pack(), attempt)

    def _clips_unseen(self, attempt: Attempt) -> bool:
        """Can what clipping did only be read from the gradients that are left after the update? Optimizers other than torch's may change them."""
        if "run.clip_scale" not in self.monitor.keys or self.known.framework != "lightning" or self.known.clips_exactly:
            return False
        return type(attempt.owned.optimizer).__module__.startswith("torch.optim.")

    def _own(self) -> float:
        """Seconds spent in trainvet, with those of a look and of the present call that are not yet counted."""
        return self.monitor.own_seconds + self.sampling.looking + (0.0 if self._since is None else time.perf_counter() - self._since)

    def _arrived(self, attempt: Attempt, values: Vector) -> None:
        """A packed row has reached the host."""
        attempt.unpack(values)
        if attempt.armed:
            self._was_held(attempt)
        self._row(attempt, attempt.changed)
        if not attempt.finite and not attempt.skipped:
            snapshot = self.rows.flush(attempt.step, attempt.batch, attempt.epoch, late(attempt))
            self._snapshots.append(dataclasses.replace(snapshot, urgent=True))
            return
        if not attempt.sampled:
            return
        tables = self.sampling.tables(attempt)
        self._tell_news(attempt.step)
        self._snapshots.append(self.rows.flush(attempt.step, attempt.batch, attempt.epoch, tables))

    def _was_held(self, attempt: Attempt) -> None:
        """What the guard did on the device: it held every bad update, and, latched, all that followed the first one."""
        assert self.guard is not None
        if not attempt.finite:
            attempt.held = True
            attempt.dropped = self.guard.count()
            self.guard.restore_buffers(attempt.step)
        elif self.guard.latched and self.guard.exhausted:
            attempt.held = attempt.dropped = True

    def _tell_news(self, step: int) -> None:
        if self.sampling.news:
            self.sampling.news = False
            self.monitor.begin(self.facts(), step)

    def _row(self, attempt: Attempt, changed: bool) -> None:
        skips = self.scaler or self.guard is not None
        self.rows.add(
            attempt.step,
            self.sampling.loss_name(attempt.owned),
            attempt.loss if attempt.losses else None,
            attempt.norm,
            attempt.owned.group_labels,
            attempt.rates,
            attempt.scale_value if self.scaler else None,
            (attempt.skipped or attempt.dropped) if skips else None,
            changed,
            cells(attempt, self.monitor.keys, self.known) if attempt.run or self.known.clips_exactly else {},
        )

    def _alarm(self, attempt: Attempt, gradients: list[Tensor | None]) -> list[Snapshot]:
        """A non-finite row, before the update: everything that tells where it comes from, at once."""
        owned = attempt.owned
        if self.guard is not None:
            attempt.held, attempt.dropped = True, self.guard.hold(owned, attempt.step)
        tables = early(attempt, gradients, self.plan.buffers, self._batch, self.sampling.paths)
        for values, earlier in self._readback.poll(wait=True):  # of another optimizer, in the same batch
            self._arrived(earlier, values)
        self._flush()
        self._row(attempt, attempt.changed)
        snapshot = self.rows.flush(attempt.step, attempt.batch, attempt.epoch, tables)
        self._snapshots.append(dataclasses.replace(snapshot, urgent=True))
        return self.poll()

    def _flush(self) -> None:
        if len(self.rows):
            self._tell_news(self.rows.last)
            self._snapshots.append(self.rows.flush(self.rows.last, self._index, self._epoch, {}))


def alone() -> bool:
    """Is this the only process of the training?"""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)


def rates(optimizer: torch.optim.Optimizer, wait: bool) -> tuple[float | Tensor, ...]:
    """The learning rate of each group; one that lives beside the parameters, in a tensor, is copied to go with the row unless ``wait``."""
    return tuple([_rate(group, wait) for group in optimizer.param_groups])


def _rate(group: dict[str, Any], wait: bool) -> float | Tensor:
    rate = group.get("lr")
    if not isinstance(rate, Tensor):
        return number(rate)
    beside = bool(group["params"]) and group["params"][0].device == rate.device
    return rate.detach().clone() if beside and not wait else float(rate)


def compiled(module: nn.Module) -> bool:
    """Is the module, or a part of it, compiled?"""
    return any(
        getattr(child, "_compiled_call_impl", None) is not None or type(child).__name__ == "OptimizedModule" or getattr(child, "_compiler_ctx", None)
        for child in module.modules()
    )

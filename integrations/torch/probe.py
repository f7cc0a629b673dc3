"""Measures one training run in PyTorch: what the edges (Lightning, a plain loop) call at the marked places of a step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainvet.finding import Finding, Severity
from trainvet.integrations.torch import kernels
from trainvet.integrations.torch.activations import Look, Windows
from trainvet.integrations.torch.forensics import locate
from trainvet.integrations.torch.guard import Guard, device_side
from trainvet.integrations.torch.loss_scale import LossScale
from trainvet.integrations.torch.losses import describe, same, tensors_in
from trainvet.integrations.torch.plan import MEASURABLE, Owned, Plan, Sketch, number
from trainvet.integrations.torch.readback import Readback
from trainvet.integrations.torch.rows import Rows
from trainvet.monitor import Monitor
from trainvet.statistics import Facts, Loss, Schedule, Snapshot, Subject, Table, Vector

LINEAR = frozenset({"norm", "rms", "mean", "abs_mean", "std", "abs_max", "min", "max"})
SUSPECT = 3  # samples with an unchanged sketch after which a parameter is compared in full


@dataclasses.dataclass
class Attempt:
    """One optimizer-step attempt on its way: what was measured, in the order in which the packed row holds it."""

    step: int
    batch: int
    epoch: int
    owned: Owned
    sampled: bool
    rates: tuple[float, ...]
    parts: list[tuple[str, str, Tensor]] = dataclasses.field(default_factory=list)
    names: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constant: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    sketch: Sketch | None = None
    scale: Tensor | None = None
    scaled: bool = False
    has_loss: bool = True
    bad: bool = False
    dropped: bool = False


@dataclasses.dataclass(frozen=True)
class Known:
    """What only the edge knows; handed over at the start and whenever it changes."""

    framework: str = "torch"
    planned_steps: int | None = None
    schedules: tuple[Schedule, ...] = ()
    precision: str = "32"
    clipping: float = 0.0
    accumulation: int = 1
    manual_optimization: bool = False
    resumed: bool = False
    unobservable: dict[str, str] = dataclasses.field(default_factory=dict)


class Probe:
    """Measures on the device and reads rows back later; on CPU (or ``strict``) the decisive numbers are read before the update.

    Order of calls in a step: :meth:`forward`, :meth:`loss` (per micro-batch), :meth:`gradients` and :meth:`updated` (per optimizer step),
    :meth:`poll`. ``replay`` runs the present batch once more and returns the loss; it is used once, to locate a fault.
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
        step: int = 0,
        applied: int | None = None,
        replay: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self.module = module
        self.monitor = monitor
        self.known = known or Known()
        self.scaler = LossScale(scaler)
        self.guard = guard
        self.strict = strict
        self.replay = replay
        self.step = step
        self.sampled_seconds = 0.0
        self.plan = Plan(module, optimizers)
        self.rows = Rows(step if applied is None else applied)
        self._readback: Readback[Attempt] = Readback()
        self._sketches: dict[int, Sketch] = {}
        self._unchanged: dict[str, int] = {}
        self._windows = Windows()
        self._look: Look | None = None
        self._traced = False
        self._sites: tuple[Subject, ...] = ()
        self._data: dict[str, Subject] = {}
        self._losses: dict[str, Loss] = {}
        self._paths: dict[str, str] = {}
        self._batch: Any = None
        self._index = self._epoch = 0
        self._micro: list[Tensor] = []
        self._pending: Attempt | None = None
        self._stepped: set[int] = set()
        self._snapshots: list[Snapshot] = []
        self._before_update = all(parameter.device.type == "cpu" for parameter in module.parameters()) or strict
        self._compiled = compiled(module)
        self._told_facts: Facts | None = None

    # ---- facts

    def facts(self) -> Facts:
        """The plan as it stands."""
        unobservable = dict(self.known.unobservable)
        if self._compiled:
            reason = "the module is compiled: hooks attached now would not run"
            unobservable |= {"activation": reason, "input": reason}
        if not self.scaler:
            unobservable |= {"run.loss_scale": "no loss scaler in use"}
            if self.guard is None:
                unobservable |= {"run.skipped": "no loss scaler in use, and no guard was asked for"}
        return Facts(
            framework=self.known.framework,
            subjects=(*self.plan.subjects(), *self._sites, *self._data.values()),
            planned_steps=self.known.planned_steps,
            optimizers=self.plan.optimizer_facts(),
            schedules=self.known.schedules,
            losses=tuple(self._losses.values()),
            precision=self.known.precision,
            loss_scaler=bool(self.scaler),
            growth_interval=self.scaler.growth_interval,
            clipping=self.known.clipping,
            accumulation=self.known.accumulation,
            manual_optimization=self.known.manual_optimization,
            every_step=True,
            resumed=self.known.resumed,
            profile="gan" if self.known.manual_optimization and len(self.plan.optimizers) > 1 else "",
            unobservable=unobservable,
        )

    def refresh(self, known: Known | None = None) -> bool:
        """Rebuild the plan if parameters joined, left, froze or thawed, or the edge knows more now; True when the facts changed."""
        if known is not None:
            self.known = known
        if known is None and not self.plan.changed():
            return False
        depth, before_norm = self.plan.depth, self.plan.before_norm
        self.plan = Plan(self.module, self.plan.optimizers)
        if self._traced:
            self.plan.depth, self.plan.before_norm = depth, before_norm
        self._sketches.clear()
        return True

    # ---- the step, in order

    def forward(self, batch: Any, index: int, epoch: int) -> None:
        """A training forward begins: on sampled steps the look goes on."""
        self._batch, self._index, self._epoch = batch, index, epoch
        self._stepped.clear()
        if self.guard is not None:
            self.guard.before_forward(self.plan.buffers)
        if self._look is None and self.monitor.due(self.step) and not self._compiled:
            want = self.monitor.want(self.step)
            if not self._traced or any(key.startswith(("activation.", "input.", "label.")) for key in want):
                self._look = Look(self.plan.modules, want)
                self._look.start()

    def loss(self, value: Tensor, factor: float = 1.0) -> None:
        """A loss is about to be differentiated; ``factor`` undoes the trainer's division by accumulation steps."""
        if self._look is not None:
            self._look.pause()
        value = value.detach()
        self._micro.append(value if factor == 1.0 else value * factor)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Snapshot]:
        """The gradients of one optimizer step are complete, unscaled if they ever are, not yet clipped.

        Returns what must be judged before the update: a snapshot when the loss or a gradient is not finite and nobody else skips the step.
        """
        owned = next((item for item in self.plan.owned if item.optimizer is optimizer), None)
        if owned is None or id(optimizer) in self._stepped:  # e.g. the second evaluation of one L-BFGS step
            return []
        self._stepped.add(id(optimizer))
        self._finish()
        started = time.perf_counter()
        sampled = self.monitor.due(self.step)
        if sampled and self.refresh():
            owned = next(item for item in self.plan.owned if item.optimizer is optimizer)
            self._told_facts = None
        attempt = Attempt(self.step, self._index, self._epoch, owned, sampled, rates(optimizer))
        self.step += 1
        self._pending = attempt
        gradients = [parameter.grad for parameter in owned.tensors]
        norms = kernels.norms(gradients)
        loss = self._minimised(norms)
        attempt.has_loss = loss is not None
        head = torch.cat([norms.new_zeros(1) if loss is None else loss.reshape(1), norms])
        attempt.parts.append(("head", "", head))
        self._read_scale(attempt, head)
        early: list[Snapshot] = []
        if self._before_update:
            values = head.numpy() if head.device.type == "cpu" else head.cpu().numpy()
            attempt.bad = not bool(np.isfinite(values).all()) and not self.scaler
            if attempt.bad:
                attempt.sampled = sampled = False
                early = self._alarm(attempt, gradients, values)
        elif self.guard is not None and not self.scaler and device_side(owned):
            self.guard.arm(owned, head.sum())
        if sampled:
            self._sample_gradients(attempt, gradients)
            self.sampled_seconds += time.perf_counter() - started
        return early

    @property
    def lost(self) -> bool:
        """Is the step that is under way non-finite, held by the guard, and no more such steps are allowed?"""
        return self._pending is not None and self._pending.bad and self.guard is not None and not self._pending.dropped

    def updated(self) -> None:
        """The batch is over: weights have moved, or the step was skipped."""
        if self._look is not None:
            self._look.pause()
        self._finish()
        if self.guard is not None:
            self.guard.disarm()

    def poll(self, drain: bool = False) -> list[Snapshot]:
        """Snapshots that are complete; ``drain`` waits for the device and empties the rows."""
        for values, attempt in self._readback.poll(wait=drain):
            self._arrived(values, attempt)
        if drain or self.rows.full:
            self._flush()
        ready, self._snapshots = self._snapshots, []
        return ready

    def locate(self, finding: Finding) -> Finding:
        """The finding with the module in which the value was born, where a replay of the batch shows it."""
        if self.replay is None or finding.severity >= Severity.FATAL or any(name.split(".")[0] in ("input", "label") for name in finding.subjects):
            return finding
        origin = locate(self.module, self.replay)
        if origin is None:
            return dataclasses.replace(finding, evidence={**finding.evidence, "replay": "the fault did not come back when the batch was run again"})
        fed = f" from finite input in [{origin.low:.4g}, {origin.high:.4g}]" if origin.low == origin.low else " from finite input"
        what = "the loss" if origin.place == "loss" else f"{origin.place} ({origin.kind})"
        return dataclasses.replace(
            finding,
            subjects=(origin.place,),
            where=origin.place,
            message=f"first non-finite value in the {origin.direction} pass, made by {what}{fed}, batch {self._index}",
            evidence={**finding.evidence, "batch": self._index, "input_min": origin.low, "input_max": origin.high},
        )

    def close(self) -> None:
        """Everything of ours is removed from the user's objects."""
        if self._look is not None:
            self._look.stop()
            self._look = None
        if self.guard is not None:
            self.guard.disarm()
        self._batch, self._micro, self.replay = None, [], None

    # ---- inside

    def _minimised(self, norms: Tensor) -> Tensor | None:
        losses, self._micro = self._micro, []
        if not losses:
            return None
        total = losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()).float() for loss in losses]).mean()
        return total.reshape(-1).sum().to(device=norms.device, dtype=norms.dtype)

    def _read_scale(self, attempt: Attempt, head: Tensor) -> None:
        if not self.scaler:
            return
        attempt.scale = self.scaler.scale()
        attempt.scaled = not self.scaler.unscaled(attempt.owned.optimizer)
        flag = self.scaler.overflow(attempt.owned.optimizer)
        # a fused optimizer unscales inside its step: what is non-finite now is what the scaler will find
        flag = (~torch.isfinite(head[1:]).all()).float() if flag is None else flag
        scale = attempt.scale if attempt.scale is not None else torch.ones(())
        attempt.parts.append(("scale", "", torch.stack([scale.to(head.device), flag.to(head.device)])))

    def _sample_gradients(self, attempt: Attempt, gradients: list[Tensor | None]) -> None:
        owned, want = attempt.owned, self.monitor.want(attempt.step)
        attempt.names["gradient"] = owned.names
        present = np.array([gradient is not None for gradient in gradients], dtype=np.float64)
        attempt.constant["gradient", "present"] = present
        chosen = [key.split(".", 1)[1] for key in want if key.startswith("gradient.")]
        attempt.parts += self._columns("gradient", gradients, attempt.parts[0][2][1:], chosen)
        if any(key.startswith("update.") for key in want):
            sketch = self._sketches.get(id(owned.optimizer))
            if sketch is None or sketch.owned is not owned:
                embeddings = frozenset(subject.name for subject in self.plan.subjects() if subject.role == "embedding")
                sketch = self._sketches[id(owned.optimizer)] = Sketch(owned, embeddings)
            sketch.take(frozenset(name for name, count in self._unchanged.items() if count >= SUSPECT))
            attempt.sketch = sketch

    def _finish(self) -> None:
        """The update of the pending attempt is done: measure what follows it and send the row."""
        attempt, self._pending = self._pending, None
        if attempt is None:
            return
        if attempt.sampled:
            started = time.perf_counter()
            self._sample_rest(attempt)
            self.sampled_seconds += time.perf_counter() - started
        device = attempt.parts[0][2].device
        row = attempt.parts[0][2]
        if len(attempt.parts) > 1:
            row = torch.cat([part.reshape(-1).to(device) for _, _, part in attempt.parts])
        self._readback.send(row, attempt)

    def _sample_rest(self, attempt: Attempt) -> None:
        owned, want = attempt.owned, self.monitor.want(attempt.step)
        weights: list[Tensor | None] = list(owned.tensors)
        chosen = [key.split(".", 1)[1] for key in want if key.startswith("weight.")]
        if chosen:
            attempt.names["weight"] = owned.names
            norms = kernels.norms(weights)
            attempt.parts += [("weight", "norm", norms), *self._columns("weight", weights, norms, chosen)]
        if attempt.sketch is not None:
            attempt.names["update"] = owned.names
            columns = kernels.update_columns(*attempt.sketch.compare())
            attempt.parts += [("update", name, column) for name, column in columns.items()]
            attempt.sketch.before = []
        if self.plan.buffers and any(key.startswith("buffer.") for key in want):
            self.plan.refresh_buffers()
            attempt.names["buffer"] = tuple(self.plan.buffers)
            buffers: list[Tensor | None] = list(self.plan.buffers.values())
            found = kernels.counts(buffers, kernels.norms(buffers))
            attempt.parts.append(("buffer", "nonfinite", found["nan"] + found["inf"]))
            if "buffer.abs_max" in want:
                attempt.parts.append(("buffer", "abs_max", kernels.table(buffers, ["abs_max"])["abs_max"]))
        look, self._look = self._look, None
        if look is not None:
            look.finish()
            self._sample_forward(attempt, look, want)
            look.stop()

    @staticmethod
    def _columns(target: str, tensors: list[Tensor | None], norms: Tensor, chosen: list[str]) -> list[tuple[str, str, Tensor]]:
        columns = kernels.table(tensors, [name for name in kernels.FULL if name in chosen and name not in kernels.COUNTS])
        columns |= {name: column for name, column in kernels.counts(tensors, norms).items() if name in chosen}
        return [(target, name, column) for name, column in columns.items()]

    def _sample_forward(self, attempt: Attempt, look: Look, want: frozenset[str]) -> None:
        if any(key.startswith("activation.") for key in want):
            names, cells = look.columns(self._windows)
            if names:
                attempt.names["activation"] = names
                for statistic, column in cells.items():
                    device = attempt.parts[0][2].device
                    stacked = [torch.as_tensor(cell, dtype=torch.float32).to(device) if not isinstance(cell, Tensor) else cell for cell in column]
                    attempt.parts.append(("activation", statistic, torch.stack([cell.to(device=device, dtype=torch.float32) for cell in stacked])))
        labels = [call.label for call in look.calls][:1]
        inputs = [tensor for tensor in look.inputs if not any(same(tensor, label) for label in labels)]
        self._sample_data(attempt, "input", inputs, want)
        self._sample_data(attempt, "label", labels, want)
        self._learn(attempt, look, inputs, labels)

    def _sample_data(self, attempt: Attempt, target: str, tensors: list[Tensor], want: frozenset[str]) -> None:
        wanted = sorted(key.split(".", 1)[1] for key in want if key.startswith(f"{target}."))
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.bool and tensor.numel()]
        if not wanted or not tensors:
            return
        names = tuple(target if len(tensors) == 1 else f"{target}.{index}" for index in range(len(tensors)))
        attempt.names[target] = names
        wide: list[Tensor | None] = [tensor if tensor.dtype in MEASURABLE else tensor.float() for tensor in tensors]
        columns = kernels.table(wide, [name for name in kernels.FULL if name in wanted])
        attempt.parts += [(target, name, column) for name, column in columns.items()]
        if "mean_square" in wanted:
            attempt.parts.append((target, "mean_square", kernels.table(wide, ["rms"])["rms"].square()))
        if "count" in wanted:
            attempt.constant[target, "count"] = np.array([float(tensor.shape[0]) if tensor.dim() else 1.0 for tensor in tensors])

    def _learn(self, attempt: Attempt, look: Look, inputs: list[Tensor], labels: list[Tensor]) -> None:
        """What the first looks teach about structure: depths, sites, the loss, and where data sit in the batch."""
        subjects = tuple(
            Subject(
                site.name,
                "activation",
                site.module,
                site.module_type,
                site.depth,
                site.shape,
                trainable=False,
                role=site.role,
                function=site.function,
            )
            for site in sorted(look.sites.values(), key=lambda site: site.depth)
        )
        name = self._loss_name(attempt.owned)
        if name not in self._losses and look.calls:
            value = float(attempt.parts[0][2][0])
            self._losses[name] = describe(look.calls[-1], name, value)
            self._told_facts = None
        data = {
            label: Subject(label, target, "", "", -1, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), False)
            for target, tensors in (("input", inputs), ("label", labels))
            for label, tensor in zip([target if len(tensors) == 1 else f"{target}.{index}" for index in range(len(tensors))], tensors, strict=True)
        }
        known = {site.name for site in self._sites}
        if not self._traced or any(site.name not in known for site in subjects):
            merged = {site.name: site for site in (*self._sites, *subjects)}
            self._sites = tuple(sorted(merged.values(), key=lambda site: site.depth))
            self._data |= data
            self.plan.depth = {**self.plan.depth, **look.order}
            self.plan.before_norm |= look.before_norm
            for path, tensor in tensors_in(self._batch):
                for label, other in [*((label, tensor_) for label, tensor_ in zip(data, [*inputs, *labels], strict=True))]:
                    if same(tensor, other):
                        self._paths[path] = label
            self._traced = True
            self._told_facts = None

    def _loss_name(self, owned: Owned) -> str:
        return "loss" if len(self.plan.owned) == 1 else f"loss of {owned.label}"

    def _alarm(self, attempt: Attempt, gradients: list[Tensor | None], values: Vector) -> list[Snapshot]:
        """A non-finite row, before the update: everything that tells where it comes from, at once."""
        owned = attempt.owned
        tables: dict[str, Table] = {}
        columns = _host(kernels.table(gradients, kernels.COUNTS))
        present = np.array([gradient is not None for gradient in gradients], dtype=np.float64)
        tables["gradient"] = Table(owned.names, {"norm": np.asarray(values[1:], dtype=np.float64), "present": present, **columns})
        weights: list[Tensor | None] = list(owned.tensors)
        tables["weight"] = Table(owned.names, _host(kernels.table(weights, kernels.COUNTS)))
        if self.plan.buffers:
            found = kernels.table(list(self.plan.buffers.values()), kernels.COUNTS)
            tables["buffer"] = Table(tuple(self.plan.buffers), {"nonfinite": (found["nan"] + found["inf"]).cpu().double().numpy()})
        data: dict[str, Tensor] = {}
        for path, tensor in tensors_in(self._batch):
            if tensor.is_floating_point() and tensor.numel():
                data.setdefault(self._paths.get(path, f"input.{path}" if path else "input"), tensor)
        for target in ("input", "label"):
            chosen = {name: tensor for name, tensor in data.items() if name.startswith(target)}
            if chosen:
                counts = kernels.table(list(chosen.values()), kernels.COUNTS)
                tables[target] = Table(tuple(chosen), _host(counts))
        self._flush()
        if self.guard is not None:
            attempt.dropped = self.guard.hold(owned)
        self._row(attempt, float(values[0]), total(np.asarray(values[1:])), 1.0, attempt.dropped, self.guard is None)
        snapshot = self.rows.flush(attempt.step, attempt.batch, attempt.epoch, tables)
        self._snapshots.append(dataclasses.replace(snapshot, urgent=True))
        return self.poll()

    def _row(self, attempt: Attempt, loss: float, norm: float, scale: float, skipped: bool, changed: bool) -> None:
        self.rows.add(
            attempt.step,
            loss_name=self._loss_name(attempt.owned),
            loss=loss if attempt.has_loss else None,
            norm=norm,
            rates=dict(zip(attempt.owned.group_labels, attempt.rates, strict=True)),
            scale=scale if self.scaler else None,
            skipped=skipped if self.scaler or self.guard is not None else None,
            changed=changed,
        )

    def _arrived(self, values: Vector, attempt: Attempt) -> None:
        """A row has reached the host."""
        offset, columns = 0, dict(attempt.constant)
        loss, norms, scale, overflow = 0.0, np.zeros(0), 1.0, False
        for target, statistic, part in attempt.parts:
            piece = values[offset : offset + part.numel()]
            offset += part.numel()
            if target == "head":
                loss, norms = float(piece[0]), piece[1:]
            elif target == "scale":
                scale, overflow = float(piece[0]), bool(piece[1] > 0)
            else:
                columns[target, statistic] = piece
        divide = scale if attempt.scaled and scale else 1.0
        norms = norms / divide
        if attempt.bad:
            return  # was handed over before its update
        self._row(attempt, loss, total(norms), scale, overflow, not overflow)
        if not attempt.sampled:
            return
        sizes = np.sqrt([max(1, tensor.numel()) for tensor in attempt.owned.tensors])
        tables: dict[str, dict[str, Vector]] = {target: {} for target in attempt.names}
        tables["gradient"] |= {"norm": norms, "rms": norms / sizes}
        for (target, statistic), column in columns.items():
            tables[target][statistic] = column / divide if target == "gradient" and statistic in LINEAR else column
        if "weight" in tables:
            tables["weight"]["rms"] = tables["weight"]["norm"] / sizes
        if "update" in tables and not overflow:
            self._suspect(attempt.owned.names, tables["update"]["unchanged"])
        elif "update" in tables:
            del tables["update"]  # a skipped step has no update
        if self._told_facts is None:
            self._told_facts = self.facts()
            self.monitor.begin(self._told_facts, attempt.step)
        built = {target: Table(attempt.names[target], filled) for target, filled in tables.items() if filled}
        self._snapshots.append(self.rows.flush(attempt.step, attempt.batch, attempt.epoch, built))

    def _suspect(self, names: tuple[str, ...], unchanged: Vector) -> None:
        for name, same_as_before in zip(names, unchanged > 0, strict=True):
            self._unchanged[name] = self._unchanged.get(name, 0) + 1 if same_as_before else 0

    def _flush(self) -> None:
        if len(self.rows):
            self._snapshots.append(self.rows.flush(self.rows.last, self._index, self._epoch, {}))


def _host(columns: dict[str, Tensor]) -> dict[str, Vector]:
    return {name: column.cpu().double().numpy() for name, column in columns.items()}


def total(norms: Vector) -> float:
    """The L2 norm over all parameters from their norms, in float64."""
    return float(np.sqrt(np.square(norms.astype(np.float64)).sum()))


def rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group."""
    return tuple(number(group.get("lr")) for group in optimizer.param_groups)


def compiled(module: nn.Module) -> bool:
    """Is the module, or a part of it, compiled?"""
    return any(
        getattr(child, "_compiled_call_impl", None) is not None or type(child).__name__ == "OptimizedModule" or getattr(child, "_compiler_ctx", None)
        for child in module.modules()
    )

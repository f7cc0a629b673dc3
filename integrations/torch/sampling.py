"""What is measured on sampled steps: gradients, weights, updates, buffers, the forward pass, and what it teaches about structure."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainvet.integrations.torch import broken, host, kernels, precision
from trainvet.integrations.torch.activations import Look, Windows
from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.buffers import Buffers
from trainvet.integrations.torch.data import Data, Place, Seen, labelled, named, place
from trainvet.integrations.torch.data import subjects as data_subjects
from trainvet.integrations.torch.losses import Call, describe, matches, same, tensors_in
from trainvet.integrations.torch.plan import Owned, Plan, Sketch
from trainvet.integrations.torch.structure import Structure
from trainvet.monitor import Monitor
from trainvet.statistics import Loss, Subject, Table, Vector, shares

LINEAR = frozenset({"norm", "rms", "mean", "abs_mean", "std", "abs_max", "min", "max"})
USUAL = ("ratio", "rms", "unchanged")
SUSPECT = 3  # samples with an unchanged sketch after which a parameter is compared in full


class Sampling:
    """Measures the sampled steps of one run and keeps what they taught: activation sites, losses, and where data sit in the batch.

    ``news`` says that the facts have changed and are to be told before the next snapshot. ``seconds`` is the time spent here. ``blind`` says why
    the forward is not looked at any more.
    """

    def __init__(self, plan: Plan, monitor: Monitor) -> None:
        self.plan = plan
        self.monitor = monitor
        self.losses: dict[str, Loss] = {}
        self.paths: dict[str, str] = {}
        self.news = True
        self.seconds = 0.0
        self.blind = ""
        self._sketches: dict[int, Sketch] = {}
        self._embeddings = self._find_embeddings()
        self._unchanged: dict[str, int] = {}
        self._windows = Windows()
        self._look: Look | None = None
        self.structure = Structure(plan)
        self.fused_attention = False
        self._memory = Buffers()
        self._traced = False
        self._sites: dict[str, Subject] = {}
        self._data: dict[str, Subject] = {}
        self.data = Data()
        self._by_hand: set[Place] = set()

    def subjects(self) -> tuple[Subject, ...]:
        """Activation sites in depth order, inputs, labels and modules."""
        sites = sorted(self._sites.values(), key=lambda site: site.depth)
        return (*sites, *self._data.values(), *self.structure.subjects())

    def replan(self, plan: Plan) -> None:
        """The plan has changed."""
        self.plan = plan
        self._sketches.clear()
        self._embeddings = self._find_embeddings()
        self.structure.replan(plan)
        self.news = True

    @property
    def hidden_attention(self) -> bool:
        """Does all attention that was seen compute its softmax inside one call?"""
        return self.fused_attention and not any(site.role == "attention" for site in self._sites.values())

    @property
    def looking(self) -> float:
        """Seconds of the present look."""
        return 0.0 if self._look is None else self._look.seconds

    def loss_name(self, owned: Owned) -> str:
        """The name of the loss that an optimizer minimises."""
        return "loss" if len(self.plan.owned) == 1 else f"loss of {owned.label}"

    # ---- the step, in order

    def look(self, want: frozenset[str], inside: nn.Module | None = None, again: bool = False) -> None:
        """The forward of a sampled step begins (the first micro-batch counts). ``inside``: the module whose call has begun already;
        ``again``: an earlier look led to no loss."""
        if again:
            self.stop()
        if self.blind:
            return
        self.structure.start(want, again)
        if self._look is not None:
            return
        if self._traced and not any(key.startswith(("activation.", "input.", "label.", "output.")) for key in want):
            return
        self._look = Look(self.plan.modules, want)
        self._look.start(inside)

    def pause(self, more: bool = False) -> None:
        """The forward is over; ``more``: another one of the same step may follow without being announced."""
        if self._look is not None:
            self._look.pause()
        self.structure.pause(more)

    def stop(self) -> None:
        """Nothing of ours stays."""
        if self._look is not None:
            self._look.stop()
            self._look = None
        self.structure.stop()

    def gradients(self, attempt: Attempt, gradients: list[Tensor | None]) -> None:
        """Before the update."""
        started = time.perf_counter()
        owned, want = attempt.owned, self.monitor.keys
        assert attempt.norms is not None
        self.structure.gradients(attempt)
        attempt.names["gradient"] = owned.names
        attempt.constant["gradient", "present"] = np.array([gradient is not None for gradient in gradients], dtype=np.float64)
        self._columns(attempt, "gradient", gradients, want, attempt.norms)
        if attempt.scale is not None and "gradient.underflow_share" in want:
            attempt.parts.append(("gradient", "underflow_share", precision.underflow_share(gradients, attempt.scale, attempt.scaled)))
        if "update.moment_ratio" in want and (ratio := precision.moment_ratio(attempt)) is not None:
            attempt.parts.append(("update", "moment_ratio", ratio))
        if any(key.startswith("update.") for key in want):
            sketch = self._sketches.get(id(owned.optimizer))
            if sketch is None or sketch.owned is not owned:
                sketch = self._sketches[id(owned.optimizer)] = Sketch(owned, self._embeddings)
            suspects = frozenset(name for name, count in self._unchanged.items() if count >= SUSPECT)
            sketch.take(suspects, swallowed="update.swallowed_share" in want)
            attempt.sketch = sketch
        self.seconds += time.perf_counter() - started

    def updated(self, attempt: Attempt, batch: Any, over: bool = True) -> None:
        """After the update (or after it was skipped); ``over``: and so is the batch."""
        started = time.perf_counter()
        owned, want = attempt.owned, self.monitor.keys
        if any(key.startswith("weight.") for key in want):
            weights: list[Tensor | None] = list(owned.tensors)
            attempt.names["weight"] = owned.names
            self._columns(attempt, "weight", weights, want | {"weight.norm"})
        if attempt.sketch is not None:
            attempt.names["update"] = owned.names
            for name, column in attempt.sketch.compare().items():
                if name not in USUAL and f"update.{name}" not in want:
                    continue
                if isinstance(column, Tensor):
                    attempt.parts.append(("update", name, column))
                else:
                    attempt.constant["update", name] = column
            attempt.sketch = None
        if any(key.startswith("buffer.") for key in want):
            self._buffers(attempt, want)
        if over:
            self.structure.counted(attempt, want)
        look, self._look = self._look, None
        if look is not None:
            self.monitor.own_seconds += look.seconds
            self.seconds += look.seconds
            if look.error is None:
                look.finish()
                self._forward(attempt, look, want, batch)
            else:
                self._give_up(look.error)
            look.stop()
        self.structure.traced()
        self.news, self.structure.news = self.news or self.structure.news, False
        if self.structure.error is not None and not self.blind:
            self._give_up(self.structure.error)
        self.seconds += time.perf_counter() - started

    def broken(self, error: BaseException | None, batch: Any) -> dict[str, Table]:
        """The user's code raised: what the look saw before it did; without a look, what the traceback of ``error`` holds. Empty unless an index or
        a label was out of range.

        ``batch``: the arguments of the outermost module, where they are known.
        """
        look, want = self._look, self.monitor.keys
        if look is None and error is not None and not self.blind:
            look = broken.look_back(error, self.plan.modules, want)
            if not look.handed.indices and look.handed.pending is None:
                return {}
        if look is None or look.error is not None:
            return {}
        look.pause()
        seen = broken.seen_before(look, self.data, batch)
        found = broken.tables(look, seen, self.data, want)
        if not broken.explains(found, look):
            return {}
        name = self.loss_name(self.plan.owned[0])
        for number, call in seen.calls.items():
            if name not in self.losses:
                self.losses[name] = describe(call, name, None, *self.data.names(number))
        self._data |= {subject.name: subject for subject in data_subjects(seen)}
        self.news = True
        return found

    def tables(self, attempt: Attempt) -> dict[str, Table]:
        """The attempt's columns, on the host, as tables."""
        self.structure.arrived(attempt)
        self.news, self.structure.news = self.news or self.structure.news, False
        sizes = np.sqrt([max(1, tensor.numel()) for tensor in attempt.owned.tensors])
        tables: dict[str, dict[str, Vector]] = {target: {} for target in attempt.names}
        tables["gradient"] |= {"norm": attempt.host_norms, "rms": attempt.host_norms / sizes}
        divide = attempt.scale_value if attempt.scaled and attempt.scale_value else 1.0
        for (target, statistic), column in attempt.columns.items():
            tables[target][statistic] = column / divide if target == "gradient" and statistic in LINEAR else column
        if "weight" in tables:
            tables["weight"]["rms"] = tables["weight"]["norm"] / sizes
        if "update" in tables:
            if attempt.skipped:
                del tables["update"]  # a skipped step has no update
            else:
                for name, same_as_before in zip(attempt.owned.names, tables["update"]["unchanged"] > 0, strict=True):
                    self._unchanged[name] = self._unchanged.get(name, 0) + 1 if same_as_before else 0
        return {target: Table(attempt.names[target], columns) for target, columns in tables.items() if columns}

    # ---- inside

    def _give_up(self, error: Exception) -> None:
        self.blind, self.news = f"an error inside trainvet: {error!r}", True
        try:
            raise error
        except Exception:
            self.monitor.failed("looking at the forward pass was switched off")

    def _find_embeddings(self) -> frozenset[str]:
        return frozenset(subject.name for subject in self.plan.subjects() if subject.role == "embedding")

    @staticmethod
    def _columns(attempt: Attempt, target: str, tensors: list[Tensor | None], want: frozenset[str], norms: Tensor | None = None) -> None:
        """The wanted statistics of some tensors: host memory is read at once, a device is not waited for."""
        wanted = [name for name in kernels.FULL if f"{target}.{name}" in want] + shares(target, want)
        values = host.arrays(tensors) if norms is None or norms.device.type == "cpu" else None
        if values is not None:
            lengths = host.norms(values) if norms is None else norms.double().numpy()
            columns = host.table(values, wanted, lengths)
            if target == "gradient" and "identical_rows" in columns:
                columns["identical_rows"] *= lengths > 0  # rows of nothing but zeros say nothing
            attempt.constant |= {(target, name): column for name, column in columns.items()}
            if f"{target}.norm" in want and norms is None:
                attempt.constant[target, "norm"] = lengths
            return
        measured = kernels.norms(tensors) if norms is None else norms
        found = kernels.table(tensors, wanted)
        if target == "gradient" and "identical_rows" in found:
            found["identical_rows"] = found["identical_rows"] * (measured > 0)
        attempt.parts += [(target, name, column) for name, column in found.items()]
        if f"{target}.norm" in want and norms is None:
            attempt.parts.append((target, "norm", measured))

    def _buffers(self, attempt: Attempt, want: frozenset[str]) -> None:
        self.plan.refresh_buffers()
        if not self.plan.buffers:
            return
        self._memory.measure(attempt, self.plan.buffers, want)

    def _forward(self, attempt: Attempt, look: Look, want: frozenset[str], batch: Any) -> None:
        assert attempt.norms is not None
        if any(key.startswith("activation.") for key in want):
            names, cells = look.columns(self._windows)
            if names:
                attempt.names["activation"] = names
                for statistic, column in cells.items():
                    if attempt.norms.device.type == "cpu" or all(not isinstance(cell, Tensor) for cell in column):
                        attempt.constant["activation", statistic] = np.array([float(cell) for cell in column])
                        continue
                    like = attempt.norms.new_empty((), dtype=torch.float32)
                    stacked = [cell.to(like) if isinstance(cell, Tensor) else like.new_full((), cell) for cell in column]
                    attempt.parts.append(("activation", statistic, torch.stack(stacked)))
        look.calls = self._losses_of(look, attempt)
        seen = self._seen(look)
        self._describe(self.loss_name(attempt.owned), attempt, look, seen)
        self.data.sample(attempt, seen, want)
        self.data.indices(attempt, look.handed.indices, want)
        self._learn(look, seen, batch)

    def _losses_of(self, look: Look, attempt: Attempt) -> list[Call]:
        """The calls of loss functions; an error that is written out counts where there is none, and only if it is what is minimised."""
        usual = [call for call in look.calls if not call.by_hand]
        if usual or not look.calls:
            return usual
        if not self.losses and attempt.losses:
            value = float(attempt.losses[0].sum())
            self._by_hand = {place(call) for call in look.calls if matches(call, value)}
        return [call for call in look.calls if place(call) in self._by_hand]

    def _seen(self, look: Look) -> Seen:
        """Inputs and calls by name. A label that the model was handed too is no input, unless it is the only one (an auto-encoder)."""
        calls = self.data.name(look.calls)
        usual = [tensor for tensor in look.inputs if tensor.dtype is not torch.bool]
        inputs = [tensor for tensor in usual if not any(same(tensor, call.label) for call in calls.values())]
        return Seen(named("input", inputs or usual), calls, look.handed.embeddings)

    def _describe(self, name: str, attempt: Attempt, look: Look, seen: Seen) -> None:
        """Which of the loss functions that are called is the loss that is minimised; the last one where none of them is it alone."""
        if name in self.losses or not look.calls or not attempt.losses:
            return
        value, home = float(attempt.losses[0].sum()), {place(call): number for number, call in seen.calls.items()}
        described = [describe(call, name, value, *self.data.names(home[place(call)])) for call in look.calls]
        main = next((loss for loss in described if loss.kind != "unknown"), described[-1])
        self.losses[name] = main
        for number, call in seen.calls.items():
            label, output = self.data.names(number)
            if output != main.output:
                part = f"{name}: {call.function} {number[1:]}"
                self.losses[part] = describe(call, part, None, label, output)
        self.news = True

    def _learn(self, look: Look, seen: Seen, batch: Any) -> None:
        """What a look teaches about structure: depths, sites, the loss, and where data sit in the batch."""
        self.fused_attention = self.fused_attention or look.fused_attention
        fresh = [site for site in look.sites.values() if site.name not in self._sites]
        known = {**seen.inputs, **{f"label{number}": call.label for number, call in seen.calls.items() if labelled(call)}}
        if self._traced and not fresh and self._data.keys() >= known.keys():
            return
        for site in fresh:
            self._sites[site.name] = Subject(
                site.name,
                "activation",
                site.module,
                site.module_type,
                site.depth,
                site.shape,
                trainable=False,
                dtype=site.dtype,
                role=site.role,
                function=site.function,
            )
        self._data |= {subject.name: subject for subject in data_subjects(seen)}
        self.plan.depth |= look.order
        self.plan.before_norm |= look.before_norm
        for path, tensor in tensors_in(batch):
            label = next((label for label, other in known.items() if same(tensor, other)), None)
            if label is not None:
                self.paths[path] = label
        self._traced = self.news = True

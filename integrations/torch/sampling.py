"""What is measured on sampled steps: gradients, weights, updates, buffers, the forward pass, and what it teaches about structure."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainvet.integrations.torch import host, kernels
from trainvet.integrations.torch.activations import Look, Windows
from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.losses import describe, same, tensors_in
from trainvet.integrations.torch.plan import MEASURABLE, Owned, Plan, Sketch
from trainvet.monitor import Monitor
from trainvet.statistics import Loss, Subject, Table, Vector, shares

LINEAR = frozenset({"norm", "rms", "mean", "abs_mean", "std", "abs_max", "min", "max"})
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
        self._traced = False
        self._sites: dict[str, Subject] = {}
        self._data: dict[str, Subject] = {}
        self._call: dict[str, int] = {}

    def subjects(self) -> tuple[Subject, ...]:
        """Activation sites in depth order, inputs and labels."""
        return (*sorted(self._sites.values(), key=lambda site: site.depth), *self._data.values())

    def replan(self, plan: Plan) -> None:
        """The plan has changed."""
        self.plan = plan
        self._sketches.clear()
        self._embeddings = self._find_embeddings()
        self.news = True

    def loss_name(self, owned: Owned) -> str:
        """The name of the loss that an optimizer minimises."""
        return "loss" if len(self.plan.owned) == 1 else f"loss of {owned.label}"

    # ---- the step, in order

    def look(self, want: frozenset[str], inside: nn.Module | None = None, again: bool = False) -> None:
        """The forward of a sampled step begins (the first micro-batch counts). ``inside``: the module whose call has begun already;
        ``again``: an earlier look led to no loss."""
        if again:
            self.stop()
        if self.blind or self._look is not None:
            return
        if self._traced and not any(key.startswith(("activation.", "input.", "label.")) for key in want):
            return
        self._look = Look(self.plan.modules, want)
        self._look.start(inside)

    def pause(self) -> None:
        """The forward is over."""
        if self._look is not None:
            self._look.pause()

    def stop(self) -> None:
        """Nothing of ours stays."""
        if self._look is not None:
            self._look.stop()
            self._look = None

    def gradients(self, attempt: Attempt, gradients: list[Tensor | None]) -> None:
        """Before the update."""
        started = time.perf_counter()
        owned, want = attempt.owned, self.monitor.keys
        assert attempt.norms is not None
        attempt.names["gradient"] = owned.names
        attempt.constant["gradient", "present"] = np.array([gradient is not None for gradient in gradients], dtype=np.float64)
        self._columns(attempt, "gradient", gradients, want, attempt.norms)
        if any(key.startswith("update.") for key in want):
            sketch = self._sketches.get(id(owned.optimizer))
            if sketch is None or sketch.owned is not owned:
                sketch = self._sketches[id(owned.optimizer)] = Sketch(owned, self._embeddings)
            sketch.take(frozenset(name for name, count in self._unchanged.items() if count >= SUSPECT))
            attempt.sketch = sketch
        self.seconds += time.perf_counter() - started

    def updated(self, attempt: Attempt, batch: Any) -> None:
        """After the update (or after it was skipped)."""
        started = time.perf_counter()
        owned, want = attempt.owned, self.monitor.keys
        if any(key.startswith("weight.") for key in want):
            weights: list[Tensor | None] = list(owned.tensors)
            attempt.names["weight"] = owned.names
            self._columns(attempt, "weight", weights, want | {"weight.norm"})
        if attempt.sketch is not None:
            attempt.names["update"] = owned.names
            for name, column in attempt.sketch.compare().items():
                if isinstance(column, Tensor):
                    attempt.parts.append(("update", name, column))
                else:
                    attempt.constant["update", name] = column
            attempt.sketch = None
        if any(key.startswith("buffer.") for key in want):
            self._buffers(attempt, want)
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
        self.seconds += time.perf_counter() - started

    def tables(self, attempt: Attempt) -> dict[str, Table]:
        """The attempt's columns, on the host, as tables."""
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
        attempt.names["buffer"] = tuple(self.plan.buffers)
        buffers: list[Tensor | None] = list(self.plan.buffers.values())
        values = host.arrays(buffers)
        if values is not None:
            found = host.table(values, [*kernels.COUNTS, "abs_max"], host.norms(values))
            attempt.constant["buffer", "nonfinite"] = found["nan"] + found["inf"]
            attempt.constant["buffer", "abs_max"] = found["abs_max"]
            return
        columns = kernels.table(buffers, [*kernels.COUNTS, "abs_max"])
        attempt.parts += [("buffer", "nonfinite", columns["nan"] + columns["inf"]), ("buffer", "abs_max", columns["abs_max"])]

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
        index = self._which(self.loss_name(attempt.owned), attempt, look)
        labels = [look.calls[index].label] if index < len(look.calls) else []
        inputs = [tensor for tensor in look.inputs if not any(same(tensor, label) for label in labels)]
        data = {**_named("input", inputs), **_named("label", labels)}
        self._sample_data(attempt, "input", inputs, want)
        self._sample_data(attempt, "label", labels, want)
        self._learn(attempt, look, data, batch)

    def _which(self, name: str, attempt: Attempt, look: Look) -> int:
        """Which of the loss functions that are called is the loss that is minimised; the last one where none of them is it alone."""
        if name not in self._call and look.calls and attempt.losses:
            value = float(attempt.losses[0].sum())
            described = [describe(call, name, value) for call in look.calls]
            index = next((place for place, loss in enumerate(described) if loss.kind != "unknown"), len(described) - 1)
            self._call[name], self.losses[name] = index, described[index]
            self.news = True
        return self._call.get(name, 0)

    def _sample_data(self, attempt: Attempt, target: str, tensors: list[Tensor], want: frozenset[str]) -> None:
        wanted = [key.split(".", 1)[1] for key in want if key.startswith(f"{target}.")]
        named = {name: tensor for name, tensor in _named(target, tensors).items() if tensor.dtype is not torch.bool and tensor.numel()}
        if not wanted or not named:
            return
        attempt.names[target] = tuple(named)
        wide: list[Tensor | None] = [tensor if tensor.dtype in MEASURABLE else tensor.float() for tensor in named.values()]
        self._columns(attempt, target, wide, want)
        if "mean_square" in wanted:
            attempt.parts.append((target, "mean_square", kernels.table(wide, ["rms"])["rms"].square()))
        if "count" in wanted:
            attempt.constant[target, "count"] = np.array([float(tensor.shape[0]) if tensor.dim() else 1.0 for tensor in named.values()])

    def _learn(self, attempt: Attempt, look: Look, data: dict[str, Tensor], batch: Any) -> None:
        """What a look teaches about structure: depths, sites, the loss, and where data sit in the batch."""
        fresh = [site for site in look.sites.values() if site.name not in self._sites]
        if self._traced and not fresh:
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
                role=site.role,
                function=site.function,
            )
        for label, tensor in data.items():
            kind = label.split(".", 1)[0]
            self._data[label] = Subject(label, kind, "", "", -1, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), False)
        self.plan.depth |= look.order
        self.plan.before_norm |= look.before_norm
        for path, tensor in tensors_in(batch):
            for label, other in data.items():
                if same(tensor, other):
                    self.paths[path] = label
        self._traced = self.news = True


def _named(target: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {target if len(tensors) == 1 else f"{target}.{index}": tensor for index, tensor in enumerate(tensors)}

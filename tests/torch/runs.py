"""A hand-driven probe: the calls an edge makes, without any edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainvet.finding import Finding
from trainvet.integrations.torch.probe import Probe
from trainvet.monitor import Monitor
from trainvet.rule import Rule
from trainvet.selection import choose
from trainvet.statistics import MEANING, Facts, Snapshot


class Everything(Rule):
    """Reads every statistic and keeps what it is handed."""

    code = "ZZ100"
    sees_poison = True
    reads = frozenset(MEANING)

    def __init__(self, reads: Iterable[str] = MEANING) -> None:
        self.reads = frozenset(reads)  # type: ignore[misc]
        self.plans: list[Facts] = []
        self.seen: list[Snapshot] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Everything:
        return self  # the callback judges with copies of the rules; this one is to be looked at

    def begin(self, facts: Facts) -> Iterable[Finding]:
        self.plans.append(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        self.seen.append(snapshot)
        return ()

    def sampled(self, key: str) -> dict[int, dict[str, float]]:
        """{step: {subject: value}} of a sampled statistic."""
        columns = [(snapshot.step, snapshot.column(key)) for snapshot in self.seen]
        return {step: dict(zip(column[0], column[1].tolist(), strict=True)) for step, column in columns if column is not None}

    def series(self, key: str, name: str | None = None) -> dict[int, float]:
        """{step: value} of an every-step series."""
        rows: dict[int, float] = {}
        for snapshot in self.seen:
            for subject, track in snapshot.tracks(key).items():
                if name in (None, subject):
                    rows |= dict(zip(track.steps.tolist(), track.values.tolist(), strict=True))
        return rows


class Driven:
    """A module, its optimizer, a probe and a monitor that measures everything; :meth:`step` makes one training step."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        rules: Sequence[Rule] = (),
        select: Sequence[str] = (),
        every: int | str = "auto",
        **arguments: Any,
    ) -> None:
        self.module = module
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self.seen = Everything()
        self.monitor = Monitor(choose(select, rules=[self.seen, *rules]), every=every)
        self.probe = Probe(module, self.optimizers, self.monitor, **arguments)
        self.monitor.begin(self.probe.facts())
        self.monitor.locate = self.probe.locate
        self.index = 0

    def observe(self, snapshots: Iterable[Snapshot]) -> None:
        for snapshot in snapshots:
            self.monitor.observe(snapshot)

    def step(self, x: Tensor, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean()) -> None:
        self.probe.forward((x,), self.index, 0)
        value = loss(self.module(x))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.probe.loss(value)
        value.backward()
        for optimizer in self.optimizers:
            self.observe(self.probe.gradients(optimizer))
            optimizer.step()
        self.probe.updated()
        self.observe(self.probe.poll())
        self.index += 1

    def end(self) -> None:
        self.observe(self.probe.poll(drain=True))
        self.probe.close()
        assert self.monitor.errors == []


def net(*layers: nn.Module) -> nn.Sequential:
    """The layers given, else a small network with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))))


def steps(driven: Driven, count: int, poison: Iterable[int] = ()) -> None:
    """``count`` steps on random batches; the ``poison`` ones are NaN."""
    generator = torch.Generator().manual_seed(7)
    for index in range(count):
        x = torch.randn(8, 4, generator=generator)
        driven.step(x * float("nan") if index in poison else x)

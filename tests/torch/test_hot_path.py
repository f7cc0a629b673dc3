"""What a step costs on which nothing is sampled, where numbers are read late: framework calls, bytes, allocations and host reads, with ceilings.

The device form of the probe is driven on the CPU: everything but the waiting is the same there.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.torch.runs import Driven, steps
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.probe import Probe

VIEWS = ("detach", "view", "slice", "select", "reshape", "alias", "unsqueeze", "squeeze", "expand", "t.", "as_strided")


@dataclasses.dataclass
class Cost(TorchDispatchMode):
    """Everything that torch is asked to do."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes_read: int = 0
    allocations: int = 0
    host_reads: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        self.calls[name] += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not name.startswith(VIEWS):
            self.bytes_read += sum(leaf.numel() * leaf.element_size() for leaf in inputs)
            self.allocations += sum(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        self.host_reads += name.startswith(("_local_scalar_dense", "item", "is_nonzero", "equal"))
        return result


def mlp() -> nn.Sequential:
    """20 tensors, 35 thousand parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(4, 64), *layers)


class Measured(Driven):
    """A driven probe whose own work is counted, apart from the work of the training."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.costs: list[Cost] = []
        self.cost: Cost | None = None
        for name in ("forward", "loss", "gradients", "updated", "poll"):
            setattr(self.probe, name, self.counted(getattr(self.probe, name)))

    def counted(self, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.cost is None:
                return call(*args, **kwargs)
            with self.cost:
                return call(*args, **kwargs)

        return run

    @contextmanager
    def counting(self) -> Iterator[Cost]:
        self.cost = Cost()
        yield self.cost
        self.cost = None


def measured(optimizer: Any = torch.optim.AdamW, optimizer_arguments: Any = None, **arguments: Any) -> tuple[Measured, Cost, int]:
    module = mlp()
    driven = Measured(module, optimizer(module.parameters(), **(optimizer_arguments or {"lr": 1e-4})), every=50, before_update=False, **arguments)
    steps(driven, 12)  # the dense start
    assert not driven.monitor.due(driven.probe.step)
    with driven.counting() as cost:
        steps(driven, 20)
    return driven, cost, sum(parameter.numel() * 4 for parameter in module.parameters())


MODES: dict[str, Any] = {
    "observing": {},
    "guarded": {"guard": True, "optimizer_arguments": {"lr": 1e-4, "fused": True}},
    "scaled": {"scaler": True},
}
CEILINGS = {"observing": (3, 2), "guarded": (8, 7), "scaled": (6, 3)}  # framework calls without views, and tensors made besides a number per gradient


@pytest.mark.parametrize("mode", MODES)
def test_a_hot_step_stays_below_its_ceilings(mode: str) -> None:
    arguments = dict(MODES[mode])
    if arguments.pop("guard", False):
        arguments["guard"] = Guard(True, 0)
    if arguments.pop("scaler", False):
        arguments["scaler"] = scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
    driven, cost, gradient_bytes = measured(**arguments)
    assert cost.host_reads == 0
    calls, tensors = CEILINGS[mode]
    working = sum(count for name, count in cost.calls.items() if not name.startswith(VIEWS))  # how many views a call makes differs by version
    assert working / 20 <= calls, cost.calls
    assert cost.allocations / 20 <= tensors + 20, cost.calls
    assert cost.bytes_read / 20 <= 1.01 * gradient_bytes, "one read of the gradients"
    driven.end()
    assert sorted(driven.seen.series("loss.value")) == list(range(32)), "and every step was seen"


def test_reading_in_the_hot_path_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter itself: one float() per step shows."""
    loss = Probe.loss
    monkeypatch.setattr(Probe, "loss", lambda self, value, *more, **named: (float(value), loss(self, value, *more, **named))[1])
    _, cost, _ = measured()
    assert cost.host_reads == 20


def test_nothing_is_read_between_the_backward_and_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by numpy() and tolist() either, which no dispatch mode sees: rows are read when they are polled, one per step."""
    reads: list[str] = []
    polling: list[bool] = []
    module = mlp()
    driven = Driven(module, torch.optim.SGD(module.parameters(), lr=1e-4), every=50, before_update=False)
    steps(driven, 12)
    poll = driven.probe.poll
    monkeypatch.setattr(driven.probe, "poll", lambda *args, **kwargs: (polling.append(True), poll(*args, **kwargs), polling.pop())[1])
    for name in ("numpy", "tolist", "item", "__float__", "__bool__", "__int__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, _noting(original, name, reads, polling))
    steps(driven, 20)
    assert reads == ["numpy while polling"] * 20


def _noting(original: Any, name: str, reads: list[str], polling: list[bool]) -> Any:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        reads.append(f"{name} while polling" if polling else name)
        return original(self, *args, **kwargs)

    return call


def test_memory_between_steps_does_not_grow() -> None:
    module = mlp()
    driven = Driven(module, torch.optim.AdamW(module.parameters()), every=10, before_update=False)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    steps(driven, 40)
    driven.seen.seen.clear()
    before = alive()
    steps(driven, 60)
    driven.seen.seen.clear()
    assert alive() <= before

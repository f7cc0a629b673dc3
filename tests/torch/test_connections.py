"""Parameters that the loss does not depend on, and the operation that cut them off; and everything that must not be taken for one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.left_behind import left_behind
from tests.torch.runs import Driven
from trainvet.integrations.torch import connections
from trainvet.integrations.torch.connections import STEPS, Reach, TooLongError
from trainvet.integrations.torch.probe import Known
from trainvet.rules.missing_gradient import MissingGradient

TRUNK = ("trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias")


class Net(nn.Module):
    """A trunk and a head; ``between`` is what stands between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.trunk, x))


def run(module: nn.Module, steps: int = STEPS + 2, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(), **arguments: Any) -> Driven:
    driven = Driven(module, torch.optim.AdamW(module.parameters(), lr=0.01), **arguments)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        driven.step(torch.randn(6, 4, generator=generator), loss)
    driven.end()
    assert left_behind(module, driven.optimizers) == []
    return driven


def detach(trunk: nn.Module, x: Tensor) -> Tensor:
    h = trunk(x)
    assert float(h.norm()) > 0  # a number for a log
    return h.detach() * torch.ones_like(h)


def data(trunk: nn.Module, x: Tensor) -> Tensor:
    return trunk(x).data


def no_grad(trunk: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x * 2
        h = trunk(x)
    return h


@torch.no_grad()
def decorated(trunk: nn.Module, x: Tensor) -> Tensor:
    return trunk(x)


def rounded(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.round(trunk(x))


def floor_division(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.div(trunk(x), 0.1, rounding_mode="floor")


def argmax(trunk: nn.Module, x: Tensor) -> Tensor:
    return F.one_hot(trunk(x).argmax(-1), 8).float()


def compared(trunk: nn.Module, x: Tensor) -> Tensor:
    return (trunk(x) > 0).float()


def cast(trunk: nn.Module, x: Tensor) -> Tensor:
    return trunk(x).to(torch.int64).float()


def item(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.full((len(x), 8), trunk(x).mean().item())


def numpy(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.from_numpy(trunk(x).detach().numpy())


def tensor(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.tensor(trunk(x))


def clone(trunk: nn.Module, x: Tensor) -> Tensor:
    return trunk(x).clone().detach().requires_grad_()


# function, what it is called, the line counted from its start
CUTS: list[tuple[Callable[[nn.Module, Tensor], Tensor], str, int]] = [
    (detach, "detach", 3), (data, "data", 1), (no_grad, "no_grad", 1), (decorated, "no_grad", 0), (rounded, "round", 1), (argmax, "argmax", 1),
    (compared, "gt", 1), (cast, "cast to int64", 1), (item, "item", 1), (numpy, "detach", 1), (tensor, "tensor", 1), (clone, "detach", 1),
    (floor_division, "div", 1),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("between", "operation", "line"), CUTS, ids=[cut[0].__name__ for cut in CUTS])
def test_the_operation_and_its_line_are_named(between: Callable[[nn.Module, Tensor], Tensor], operation: str, line: int) -> None:
    driven = run(Net(between))
    facts = driven.seen.plans[-1]
    assert facts.disconnected == (() if operation in ("round", "div") else TRUNK), "rounding keeps a path, along which the derivative is 0"
    (cut,) = facts.severed
    assert (cut.operation, cut.parameters) == (operation, TRUNK)
    first = inspect.unwrap(between).__code__.co_firstlineno
    assert cut.source == f"tests/torch/test_connections.py:{first + line}"
    assert cut.module == ("trunk" if operation == "no_grad" else "")


def test_nothing_is_said_before_the_tenth_step() -> None:
    assert run(Net(detach), STEPS - 1).seen.plans[-1].disconnected == ()
    assert run(Net(detach), STEPS).seen.plans[-1].disconnected == TRUNK


def test_the_rule_tells_it_with_the_tenth_step() -> None:
    driven = run(Net(detach), STEPS, rules=[MissingGradient()], every=50)
    (finding,) = driven.monitor.report.findings
    assert (finding.code, finding.step, finding.subjects) == ("GR104", STEPS - 1, TRUNK)
    assert finding.message == "4 of 6 parameters have no path to the loss"
    assert finding.causes[0].startswith("detach at tests/torch/test_connections.py:")


def test_a_loss_made_anew_is_connected_to_nothing() -> None:
    facts = run(Net(lambda trunk, x: trunk(x)), loss=lambda y: torch.tensor(y.square().mean().item(), requires_grad=True)).seen.plans[-1]
    assert set(facts.disconnected) == {*TRUNK, "head.weight", "head.bias"}
    assert facts.severed[0].operation == "item"


def test_a_module_that_is_never_called_is_disconnected_and_nothing_severed_it() -> None:
    module = Net(lambda trunk, x: trunk(x))
    module.spare = nn.Linear(3, 3)
    facts = run(module).seen.plans[-1]
    assert facts.disconnected == ("spare.weight", "spare.bias")
    assert facts.severed == ()


def test_only_what_lost_its_only_path_is_listed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) + self.a(x).detach() + self.b(x).detach())

    facts = run(Two()).seen.plans[-1]
    assert facts.disconnected == ("b.weight", "b.bias")
    assert [cut.parameters for cut in facts.severed] == [("b.weight", "b.bias")]


# ---- health


def straight_through(trunk: nn.Module, x: Tensor) -> Tensor:
    h = trunk(x)
    return h + (h.round() - h).detach()


def metrics(trunk: nn.Module, x: Tensor) -> Tensor:
    h = trunk(x)
    with torch.no_grad():
        assert float((h.argmax(-1) == 0).float().mean()) >= 0
    assert h.detach().max().item() <= 1e9
    return h


def target(trunk: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        goal = trunk(x + 0.1)
    return trunk(x) - goal


def mask(trunk: nn.Module, x: Tensor) -> Tensor:
    h = trunk(x)
    return h * (h > 0) * (h.argmax(-1, keepdim=True) >= 0)


def reentrant(trunk: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(trunk, x.requires_grad_(), use_reentrant=True)


def recomputed(trunk: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(trunk, x, use_reentrant=False)


class Hidden(torch.autograd.Function):
    """Holds a parameter that no node of the graph shows."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def custom(trunk: nn.Module, x: Tensor) -> Tensor:
    return Hidden.apply(trunk(x))


def functional(trunk: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(trunk, {name: value * 1.0 for name, value in trunk.named_parameters()}, (x,))


HEALTHY = [straight_through, metrics, target, mask, reentrant, recomputed, custom, functional]


@pytest.mark.parametrize("between", HEALTHY, ids=[function.__name__ for function in HEALTHY])
def test_a_healthy_model_has_nothing_severed(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    driven = run(Net(between))
    assert (driven.seen.plans[-1].disconnected, driven.seen.plans[-1].severed) == ((), ())
    assert driven.probe.sampling.structure._connections.done, "and no more graphs are walked"


def test_a_teacher_that_follows_its_student_is_no_fault() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for mine, his in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.mul_(0.9).add_(his * 0.1)
                goal = self.teacher(x)
            h = self.student(x)
            return self.head(h) + (h - goal).square().mean()

    facts = run(Distilled()).seen.plans[-1]
    assert (facts.disconnected, facts.severed) == ((), ())


def test_what_is_used_now_and_then_is_connected() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 1), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for index, layer in enumerate(self.layers):
                x = layer(x) if index != self.calls % 3 else x
            return self.head(x)

    assert run(Dropped()).seen.plans[-1].disconnected == ()


def test_two_optimizers_that_share_a_forward() -> None:
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    optimizers = [
        torch.optim.SGD(module["a"].parameters(), lr=0.1),
        torch.optim.SGD([*module["b"].parameters(), *module["idle"].parameters()], lr=0.1),
    ]
    driven = Driven(module, optimizers, known=Known(manual_optimization=True))
    for index in range(12):
        driven.probe.forward((), index, 0)
        losses = [module["a"](x := torch.randn(3, 4)).square().mean(), module["b"](module["a"](x)).square().mean()]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            driven.probe.loss(loss)
            loss.backward()
            driven.observe(driven.probe.gradients(optimizer))
            optimizer.step()
        driven.probe.updated()
        driven.observe(driven.probe.poll())
    driven.end()
    assert driven.seen.plans[-1].disconnected == ("idle.weight", "idle.bias")


def test_micro_batches_count_together() -> None:
    module = nn.ModuleDict({"even": nn.Linear(4, 1), "odd": nn.Linear(4, 1), "idle": nn.Linear(4, 1)})
    driven = Driven(module, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
    for step in range(STEPS):
        driven.optimizers[0].zero_grad()
        for micro, part in enumerate(("even", "odd")):
            driven.probe.forward((), 2 * step + micro, 0)
            loss = module[part](torch.randn(3, 4)).square().mean()
            driven.probe.loss(loss)
            loss.backward()
        driven.observe(driven.probe.gradients(driven.optimizers[0]))
        driven.optimizers[0].step()
        driven.probe.updated()
        driven.observe(driven.probe.poll())
    driven.end()
    assert driven.seen.plans[-1].disconnected == ("idle.weight", "idle.bias")


# ---- bounds


def test_a_graph_too_large_to_walk_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "EVERY", 1)
    monkeypatch.setattr(Reach.add, "__defaults__", (-1.0,))
    module = Net(lambda trunk, x: trunk(x))
    with pytest.raises(TooLongError):
        Reach().add([module(torch.randn(2, 4)).grad_fn])
    driven = run(Net(detach))
    assert driven.seen.plans[-1].disconnected == ()


def test_a_healthy_run_is_walked_twice_and_never_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    add = Reach.add
    monkeypatch.setattr(Reach, "add", lambda self, roots: (walks.append(1), add(self, roots))[1])
    monkeypatch.setattr(connections, "Tracer", lambda *args: 1 / 0)
    run(Net(lambda trunk, x: trunk(x)))
    assert len(walks) == 2


@pytest.mark.parametrize("every", [1, 50])
def test_tracing_changes_no_number(every: int) -> None:
    def weights(watched: bool) -> list[Tensor]:
        module = Net(no_grad)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        driven = Driven(module, optimizer, every=every) if watched else None
        generator = torch.Generator().manual_seed(1)
        for _ in range(12):
            x = torch.randn(6, 4, generator=generator)
            if driven is not None:
                driven.step(x)
                continue
            loss = module(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    assert all(torch.equal(mine, bare) for mine, bare in zip(weights(True), weights(False), strict=True))

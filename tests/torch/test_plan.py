"""What is measured: which parameters, under which names, and what happens when that changes during a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch.runs import Driven, net, steps
from trainvet.integrations.torch.plan import Plan, group_labels

SGD = torch.optim.SGD


def facts(module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {subject.name: subject for subject in Plan(module, optimizers).subjects()}


def test_a_tied_weight_has_one_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

    module = Tied()
    plan = Plan(module, [SGD(module.parameters(), lr=0.1)])
    assert plan.owned[0].names == ("table.weight",)
    (subject,) = plan.subjects()
    assert (subject.name, subject.tied_to, subject.role) == ("table.weight", "head.weight", "embedding")


def test_what_is_measured_is_what_an_optimizer_moves() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.zeros(0, 8))
            self.pairs = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
            self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            self.integer = nn.Parameter(torch.arange(3), requires_grad=False)
            self.eight = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
            self.eight_trained = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.meta = nn.Parameter(torch.zeros(3, device="meta"))
            self.unowned = nn.Parameter(torch.zeros(3))
            self.register_buffer("mask", torch.tensor([True]))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("nothing", torch.zeros(0))

    module = Odd()
    held = [parameter for name, parameter in module.named_parameters() if name != "unowned"]
    plan = Plan(module, [SGD(held, lr=0.1)])
    assert plan.owned[0].names == ("scalar", "empty", "pairs", "narrow")
    assert tuple(plan.buffers) == ("mean",)
    named = {subject.name: subject for subject in plan.subjects()}
    assert set(named) == {name for name, _ in module.named_parameters()} | {"mean"}
    assert (named["frozen"].trainable, named["unowned"].group, named["scalar"].shape) == (False, "", ())
    assert (named["eight"].dtype, named["integer"].dtype) == ("float8_e4m3fn", "int64")


def test_odd_parameters_train_under_a_probe() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.pairs = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scalar + x * self.narrow.float() + (x.double() * self.wide).float() + (torch.fft.fft(x) * self.pairs).real
            return torch.cat([y, x @ self.empty.t()], 1)

    for before_update in (True, False):
        module = Odd()
        run = Driven(module, SGD(module.parameters(), lr=0.01), every=1, before_update=before_update)
        steps(run, 3)
        run.end()
        assert len(run.seen.sampled("gradient.norm")[2]) == 5
        assert run.seen.sampled("gradient.abs_max")[2]["empty"] == 0
        assert run.seen.sampled("update.ratio")[0]["pairs"] > 0


def test_an_optimizer_that_holds_tensors_of_others() -> None:
    module, other = net(), nn.Linear(2, 2)
    plan = Plan(module, [SGD([*module.parameters(), *other.parameters()], lr=0.1)])
    (optimizer,) = plan.optimizer_facts()
    assert optimizer.unknown_parameters == 2
    assert len(optimizer.parameters) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("optimizer", "family"),
    [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "sgd"),
        (lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-6), "adam"),
        (lambda p: torch.optim.RMSprop(p), "adam"),
        (lambda p: torch.optim.LBFGS(p), "other"),
    ],
)
def test_families(optimizer: Any, family: str) -> None:
    module = net()
    (described,) = Plan(module, [optimizer(module.parameters())]).optimizer_facts()
    assert described.family == family


def test_every_group_has_a_label_of_its_own() -> None:
    layers = [nn.Linear(2, 2) for _ in range(6)]
    first = SGD([{"params": layers[0].parameters(), "name": "body"}, {"params": layers[1].parameters(), "name": "body"}], lr=0.1)
    second = SGD([{"params": layers[2].parameters(), "name": "body"}, {"params": layers[3].parameters()}], lr=0.1)
    assert group_labels([first, second]) == [("body", "body (2)"), ("body (3)", "SGD 1/1")]
    assert group_labels([SGD(layers[4].parameters(), lr=0.1)]) == [("SGD",)]


# ---- changes during a run


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@pytest.mark.parametrize("every", [1, 50])
def test_a_group_that_joins_appears(every: int) -> None:
    torch.manual_seed(0)
    module = Grows()
    run = Driven(module, SGD(module.head.parameters(), lr=0.01), every=every)
    steps(run, 12)
    module.backbone.requires_grad_(True)
    run.optimizers[0].add_param_group({"params": list(module.backbone.parameters()), "lr": 0.001})
    steps(run, 12)
    run.end()
    assert run.seen.series("optimizer.learning_rate", "SGD/1") == dict.fromkeys(range(12, 24), 0.001)
    assert list(run.seen.plans[-1].optimizers[0].groups) == ["SGD/0", "SGD/1"]
    late = run.seen.sampled("gradient.norm")[23 if every == 1 else 9]
    assert ("backbone.weight" in late) is (every == 1)
    if every == 1:
        assert run.seen.sampled("update.ratio")[12]["backbone.weight"] > 0
        assert all("backbone.weight" not in row for step, row in run.seen.sampled("gradient.norm").items() if step < 12)


def test_the_whole_norm_follows_a_group_that_joins() -> None:
    torch.manual_seed(0)
    module = Grows()
    run = Driven(module, SGD(module.head.parameters(), lr=0.01), every=50)
    steps(run, 12)
    module.backbone.requires_grad_(True)
    run.optimizers[0].add_param_group({"params": list(module.backbone.parameters())})
    steps(run, 1)
    run.end()
    norm = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in module.parameters()]))  # type: ignore[misc]
    assert run.seen.series("run.gradient_norm")[12] == pytest.approx(norm, rel=1e-5)


def test_freezing_and_thawing_and_exchanging_is_noticed() -> None:
    module = net(*[nn.Linear(4, 4) for _ in range(64)])
    optimizer = SGD(module.parameters(), lr=0.1)
    plan = Plan(module, [optimizer])
    assert not plan.changed()
    module[0].weight.requires_grad_(False)  # type: ignore[index]
    assert plan.changed()
    plan = plan.again()
    assert not plan.changed()
    module[0].weight.requires_grad_(True)  # type: ignore[index]
    module[31].bias.requires_grad_(False)  # type: ignore[index]
    assert plan.changed()
    plan = plan.again()
    module[5] = nn.Linear(4, 4)  # type: ignore[index]
    assert plan.changed(), "a layer was exchanged"
    plan = plan.again()
    optimizer.param_groups[0]["params"] = list(module.parameters())
    assert plan.changed()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_are_measured_once_they_have_a_shape() -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1))
    plan = Plan(module, [SGD(module[2].parameters(), lr=0.1)])
    assert {subject.name: subject.shape for subject in plan.subjects()}["0.weight"] == ()
    module(torch.randn(2, 4))
    assert plan.changed()
    assert {subject.name: subject.shape for subject in plan.again().subjects()}["0.weight"] == (8, 4)

    module = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(8), nn.Linear(8, 1))
    run = Driven(module, SGD(module.parameters(), lr=0.01), every=1)
    steps(run, 3)
    run.end()
    assert "1.weight" in run.seen.sampled("gradient.norm")[2]


def test_buffers_that_are_exchanged_are_looked_up_again() -> None:
    class Exchanges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("average", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.average = self.average + 1
            return y

    module = Exchanges()
    run = Driven(module, SGD(module.parameters(), lr=0.01), every=1)
    steps(run, 3)
    run.end()
    assert [run.seen.sampled("buffer.abs_max")[step]["average"] for step in range(3)] == [1, 2, 3]


def test_depth_is_the_order_of_the_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    module = Backwards()
    run = Driven(module, SGD(module.parameters(), lr=0.01), every=1)
    steps(run, 1)
    run.end()
    depth = {subject.name: subject.depth for subject in run.seen.plans[-1].subjects}
    assert depth["first.weight"] < depth["last.weight"]
    assert depth["first"] < depth["last"]
    assert run.seen.plans[-1].upstream_first(["last.weight", "first.weight"]) == ("first.weight", "last.weight")

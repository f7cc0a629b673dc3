"""Where a NaN was born: faults whose place is known, values that are no fault, and a replay that leaves no trace."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.left_behind import attributes, left_behind, plain
from trainvet.integrations.torch.forensics import Origin, locate, undisturbed

NAN, INF = float("nan"), float("inf")


class Does(nn.Module):
    """A module with a function for a forward."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(*args, **kwargs)


def chain(*middle: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *[Does(step) for step in middle], nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def found(net: nn.Module, x: Tensor = X, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean()) -> tuple[str, str, str] | None:
    origin = locate(net, lambda: loss(net(x)))
    assert left_behind(net) == []
    return None if origin is None else (origin.place, origin.kind, origin.direction)


def constant_column(x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], torch.ones(len(x), 1)], dim=1)


FORWARD = {
    "division by the spread of a constant column": ([constant_column, lambda x: (x - x.mean(0)) / x.std(0)], "2"),
    "log of a negative number": ([torch.tanh, lambda x: torch.log(x - 1)], "2"),
    "log of zero": ([torch.relu, lambda x: torch.log(x * 0) * 0], "2"),
    "log of zero in front of a matrix": ([torch.relu, torch.log], "2"),
    "0/0": ([lambda x: x * 0, lambda x: x / x], "2"),
    "square root of a negative number": ([lambda x: -x.abs(), torch.sqrt], "2"),
    "exp overflows, and the difference is taken later": ([lambda x: torch.exp(200 * (1 + x.abs())), torch.relu, lambda x: x - x], "1"),
    "exp overflows": ([lambda x: torch.exp(200 * (1 + x.abs()))], "1"),
    "softmax of a row that is masked all over": ([lambda x: x.masked_fill(torch.ones(6, 4).bool(), -INF), lambda x: x.softmax(-1)], "2"),
    "-inf minus -inf": ([lambda x: torch.full_like(x, -INF) + 0 * x, lambda x: x - x.amax()], "2"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_value_born_in_the_forward(name: str) -> None:
    steps, place = FORWARD[name]
    assert found(chain(*steps)) == (place, "Does", "forward")


def test_the_range_that_fed_it_is_told() -> None:
    net = chain(lambda x: x.clamp(-1, 1) * 0 + 0.5, lambda x: torch.log(x - 1))
    origin = locate(net, lambda: net(X).sum())
    assert origin == Origin("2", "Does", "forward", 0.5, 0.5)


def test_the_innermost_module_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sequential(Does(lambda x: torch.log(-x.abs())))), nn.Linear(4, 1))
    assert found(net) == ("1.1.0", "Does", "forward")


def test_an_input_given_by_keyword_is_looked_at() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.innocent = Does(lambda value: torch.log(-value.abs())), Does(lambda value: value + 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.innocent(value=self.bad(value=x))

    assert found(Net()) == ("bad", "Does", "forward")


def test_nested_outputs_are_looked_at() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Does(lambda x: {"a": [x, None], "b": (x * NAN, 3)}), Does(lambda parts: parts["b"][0] + parts["a"][0])

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert found(Net()) == ("first", "Does", "forward")


def test_a_parameter_that_is_not_finite_is_named() -> None:
    net = chain(torch.relu)
    with torch.no_grad():
        net[2].weight[0, 0] = NAN
    assert found(net) == ("2.weight", "parameter", "forward")


def test_a_loss_that_overflows_is_the_loss() -> None:
    assert found(chain(), loss=lambda y: torch.log(-y.abs()).mean()) == ("loss", "loss", "forward")


def test_a_batch_that_is_not_finite_is_no_fault_of_a_module_or_the_loss() -> None:
    bad = X.clone()
    bad[2, 1] = NAN
    assert found(chain(torch.relu), bad) == ("input", "input", "forward")


def test_missing_values_that_the_model_masks_are_not_blamed_for_a_fault_of_the_loss() -> None:
    bad = X.clone()
    bad[2, 1] = NAN
    net = nn.Sequential(Does(lambda x: x.nan_to_num()), *chain())
    assert found(net, bad, loss=lambda y: torch.log(-y.abs()).mean()) == ("loss", "loss", "forward")


def test_a_value_made_between_two_modules_is_found_where_it_enters() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    both = nn.ModuleDict({"first": first, "second": second})
    origin = locate(both, lambda: second(torch.log(-first(X).abs())).sum())
    assert origin is not None
    assert (origin.place, origin.kind) == ("second", "input")


# ---- backward


BACKWARD = {
    "square root at 0": lambda x: torch.sqrt((x - x.detach()).abs()) + x,
    "norm at 0": lambda x: x + torch.linalg.vector_norm((x * 0), dim=1, keepdim=True).pow(0.5),
    "where hides it from the forward only": lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_value_born_in_the_backward(name: str) -> None:
    assert found(chain(torch.relu, BACKWARD[name])) == ("2", "Does", "backward")


def test_a_backward_fault_outside_all_modules_is_the_losss() -> None:
    assert found(chain(), loss=lambda y: torch.sqrt((y - y.detach()).abs()).mean()) == ("loss", "loss", "backward")


# ---- no fault


def attention(x: Tensor) -> Tensor:
    scores = (x @ x.t()).masked_fill(~torch.ones(6, 6).tril().bool(), -INF)
    return scores.softmax(-1) @ x


def test_a_legal_mask_is_no_fault() -> None:
    assert found(chain(attention)) is None


def test_a_legal_mask_is_not_blamed_for_a_fault_elsewhere() -> None:
    assert found(chain(lambda x: x.masked_fill(x > 0, -INF), torch.exp, lambda x: torch.log(-1 - x))) == ("3", "Does", "forward")


def test_a_nan_that_is_masked_is_no_fault() -> None:
    assert found(chain(lambda x: torch.where(x > -99, x, torch.log(-x.detach() - 99)))) is None
    assert found(nn.Sequential(nn.Linear(4, 4), Does(lambda x: (x, x.detach() * NAN)), Does(lambda pair: pair[0]), nn.Linear(4, 1))) is None


def test_a_healthy_batch_has_no_origin() -> None:
    assert found(chain(torch.relu)) is None


def test_without_a_loss_the_output_stands_for_it() -> None:
    good, bad = chain(torch.relu, lambda x: (x, x.detach() * NAN), lambda pair: pair[0]), chain(lambda x: torch.log(-x.abs()))
    assert locate(good, lambda: (good(X), None)[1]) is None
    origin = locate(bad, lambda: (bad(X), None)[1])
    assert origin is not None
    assert origin.place == "1"


# ---- the replay leaves no trace


class Stateful(nn.Module):
    """Keeps everything that people keep on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.outputs: list[Tensor] = []
        self.history: dict[str, list[float]] = collections.defaultdict(list)
        self.queue: collections.deque[int] = collections.deque(maxlen=3)
        self.names = {"a"}
        self.total = torch.zeros(3)
        self.counter = 0
        self.array = np.zeros(2)
        self.numbers = np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)
        self.dice = random.Random(0)
        object.__setattr__(self, "teacher", nn.Linear(4, 1))
        self._parameters_seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        noise = float(self.numbers.random()) + self.dice.random() + random.random() + np.random.rand()
        y = self.net(x + torch.rand(4, generator=self.generator) + noise)
        self.outputs.append(y)
        self.history["loss"].append(1.0)
        self.history["more"].append(1.0)
        self.queue.append(len(self.queue))
        self.names.add("b")
        self.total += 1
        self.array += 1
        self.counter += 1
        self._parameters_seen += 1
        self.extra = y
        return y


def test_state_of_the_user_is_afterwards_as_before() -> None:
    torch.manual_seed(0)
    net = Stateful()
    net(X)
    net.zero_grad()

    def state() -> Any:
        kept = {name: getattr(net, name) for name in ("history", "array", "total", "counter", "_parameters_seen")}
        kept |= {"queue": list(net.queue), "names": sorted(net.names), "outputs": list(net.outputs), "module": net.state_dict()}
        kept |= {"numbers": net.numbers.bit_generator.state, "generator": net.generator.get_state(), "dice": net.dice.getstate()}
        return plain(kept | {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()})

    before, names, identities = state(), attributes(net), [id(net.outputs), id(net.total), id(net.calls), id(net.teacher)]
    assert locate(net, lambda: net(X).square().mean() * NAN) is not None
    assert state() == before
    assert attributes(net) == names
    assert [id(net.outputs), id(net.total), id(net.calls), id(net.teacher)] == identities
    assert all(parameter.grad is None for parameter in net.parameters())


def test_state_is_put_back_when_the_replay_fails() -> None:
    net = Stateful()

    def replay() -> Tensor:
        net(X)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        locate(net, replay)
    assert net.counter == 0
    assert left_behind(net) == []


def test_a_tensor_that_the_user_keeps_loses_our_hook() -> None:
    net, latent = chain(lambda x: torch.log(-x.abs())), torch.randn(6, 4, requires_grad=True)
    locate(net, lambda: net(latent).sum())
    assert not latent._backward_hooks


def test_large_attributes_are_not_copied() -> None:
    net = chain(torch.relu)
    net.table = torch.zeros(1 << 25, dtype=torch.int8)
    with undisturbed(net):
        net.table += 1
    assert net.table[0] == 1


def test_in_place_activations_do_not_confuse_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Does(lambda x: torch.log(-1 - x)), nn.SiLU(inplace=True), nn.Linear(4, 1))
    assert found(net) == ("2", "Does", "forward")

"""What one sampled forward shows: sites, their numbers, roles, inputs and the loss call; and that it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.left_behind import left_behind
from trainvet.integrations.torch.activations import Look, Windows
from trainvet.integrations.torch.moments import on_device, on_host
from trainvet.statistics import MEANING

EVERYTHING = frozenset(key for key in MEANING if key.startswith("activation."))
EVERYTHING_SHORT = frozenset(key.split(".")[1] for key in EVERYTHING)


class Looked:
    """A finished look, with its columns on the host."""

    def __init__(self, module: nn.Module, forward: Callable[[], Any], windows: Windows | None = None, backward: bool = False) -> None:
        torch.manual_seed(0)
        self.look = Look({id(child): path for path, child in module.named_modules()}, EVERYTHING)
        self.look.start()
        self.output = forward()
        self.look.pause()
        if backward:
            self.output.sum().backward()
        self.look.finish()
        names, columns = self.look.columns(windows or Windows())
        self.inputs, self.calls = list(self.look.inputs), list(self.look.calls)
        self.look.stop()
        self.names = names
        self.values = {name: {key: float(column[index]) for key, column in columns.items()} for index, name in enumerate(names)}

    def __getitem__(self, name: str) -> dict[str, float]:
        return self.values[name]

    def roles(self) -> dict[str, str]:
        return {name: site.role for name, site in self.look.sites.items() if site.role}


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield
    assert left_behind() == []


def test_the_numbers_of_a_site_are_numpys() -> None:
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    x = 3 * torch.randn(32, 6)
    seen = Looked(net, lambda: net(x))
    assert seen.names == ("0", "1", "2")
    for name, values in (("0", net[0](x)), ("1", net[:2](x)), ("2", net(x))):
        truth = values.detach().double().numpy()
        got = seen[name]
        right = {"mean": truth.mean(), "std": truth.std(), "rms": np.sqrt(np.square(truth).mean()), "min": truth.min(), "max": truth.max()}
        right |= {"abs_max": np.abs(truth).max(), "zero_share": 0, "nan": 0, "inf": 0}
        if name == "1":
            right["saturated_share"] = (np.abs(truth) > np.tanh(2.18)).mean()
            assert 0.1 < right["saturated_share"] < 0.9
        for key, value in right.items():
            assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)


def test_the_spread_of_values_far_from_zero_is_not_lost_in_rounding() -> None:
    net = nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.mul_(0.01)
        net.bias.fill_(5000.0)
    x = torch.randn(64, 4)
    seen = Looked(net, lambda: net(x))
    (name,) = seen.names
    assert seen[name]["std"] == pytest.approx(float(net(x).detach().double().std(correction=0)), rel=0.05)


@pytest.mark.parametrize("function", ["", "tanh", "sigmoid"])
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_device_would_say_the_same_as_the_host(function: str, bad: float) -> None:
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    values[2, 3] = bad
    host, device = (kernel(values, function, EVERYTHING_SHORT) for kernel in (on_host, on_device))
    known = slice(2, 4) if bad == float("inf") else slice(0, 4)  # the mean of an infinite value is NaN or infinite
    np.testing.assert_allclose([float(value) for value in device[known]], host[known], rtol=1e-5)
    assert {key: float(value) for key, value in device[4].items()} == host[4]
    assert (host[4]["nan"], host[4]["inf"]) == (bad != bad, bad == float("inf"))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_sums_do_not_overflow(half: torch.dtype) -> None:
    class Big(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    net = Big()
    seen = Looked(net, lambda: net(torch.full((1000,), 3e4, dtype=half)))
    assert seen["Big"]["mean"] == pytest.approx(3e4, rel=0.01)
    assert seen["Big"]["rms"] == pytest.approx(3e4, rel=0.01)


# ---- dead units


class Dead(nn.Module):
    """Units 0 and 1 of four never reach above zero."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.bias.copy_(torch.tensor([-1.0, -2.0, 1.0, 2.0]))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


FUNCTIONAL = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: x.relu_(),
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clamp(0)": lambda x: x.clamp(0),
    "torch.clamp": lambda x: torch.clamp(x, min=0.0),
    "clamp_": lambda x: x.clamp_(min=0),
    "clamp_min": lambda x: x.clamp_min(0),
    "F.relu6": F.relu6,
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_forms_of_relu_are_sites(name: str) -> None:
    net = Dead(FUNCTIONAL[name])
    seen = Looked(net, lambda: net(torch.randn(7, 3)))
    assert seen.names == ("layer", "relu")
    assert seen["relu"]["dead_share"] == 0.5
    assert seen["relu"]["positions"] == 7
    assert seen["relu"]["zero_share"] == 0.5


@pytest.mark.parametrize("module", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6()], ids=str)
def test_a_relu_module_is_one_site_and_not_two(module: nn.Module) -> None:
    net = Dead(module)
    seen = Looked(net, lambda: net(torch.randn(7, 3)))
    assert seen.names == ("layer", "activation")
    assert seen["activation"]["dead_share"] == 0.5
    assert seen["layer"]["min"] == -2, "what the layer put out was measured before it was overwritten"


@pytest.mark.parametrize("bounds", [{"min": 0.5}, {"min": 0, "max": 6}, {"max": 0}], ids=str)
def test_other_clamps_are_no_relu(bounds: dict[str, float]) -> None:
    net = Dead(lambda x: x.clamp(**bounds))
    assert Looked(net, lambda: net(torch.randn(7, 3))).names == ("layer",)


SATURATING = {"F.sigmoid": F.sigmoid, "torch.tanh": torch.tanh, "Tensor.sigmoid": lambda x: x.sigmoid(), "tanh_": lambda x: x.tanh_()}


@pytest.mark.parametrize("name", SATURATING)
def test_functional_forms_of_sigmoid_and_tanh_are_sites(name: str) -> None:
    net = Dead(SATURATING[name])
    with torch.no_grad():
        net.layer.bias.copy_(torch.tensor([-9.0, 9.0, 0.1, 0.1]))
    seen = Looked(net, lambda: net(torch.randn(7, 3)))
    assert seen[seen.names[1]]["saturated_share"] == 0.5


def test_a_unit_is_dead_only_when_silent_over_the_whole_window() -> None:
    net = Dead(F.relu)
    windows = Windows()
    shares = []
    for batch in range(7):
        with torch.no_grad():
            net.layer.bias[0] = 1.0 if batch == 1 else -1.0
        seen = Looked(net, lambda: net(torch.randn(300, 3)), windows)
        shares.append((seen["relu"]["dead_share"], seen["relu"]["batches"], seen["relu"]["positions"]))
    assert shares[:5] == [(0.5, 1, 300), (0.25, 2, 600), (0.25, 3, 900), (0.25, 4, 1200), (0.25, 5, 1500)]
    assert shares[5:] == [(0.5, 1, 300), (0.5, 2, 600)], "five batches and 1,000 positions close a window"


def test_a_window_stays_open_until_it_has_seen_enough_positions() -> None:
    net = Dead(F.relu)
    windows = Windows()
    seen = [Looked(net, lambda: net(torch.randn(3, 3)), windows)["relu"]["batches"] for _ in range(8)]
    assert seen == list(range(1, 9))


def test_units_are_channels_of_a_convolution_and_the_last_axis_of_a_sequence() -> None:
    image = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv1d(5, 6, 1) if False else nn.Flatten(2), nn.ReLU())
    seen = Looked(image, lambda: image(torch.randn(2, 1, 6, 6)))
    assert seen["1"]["positions"] == 2 * 4 * 4
    sequence = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    seen = Looked(sequence, lambda: sequence(torch.randn(2, 5, 4)))
    assert seen["1"]["positions"] == 2 * 5
    signal = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
    seen = Looked(signal, lambda: signal(torch.randn(2, 3, 9)))
    assert seen["2"]["positions"] == 2 * 9


def test_units_of_a_functional_relu_follow_the_layer_before_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.line = nn.Conv1d(3, 8, 1), nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.line(F.relu(self.conv(x))))

    net = Net()
    seen = Looked(net, lambda: net(torch.randn(2, 3, 9)))
    assert [seen[name]["positions"] for name in ("relu", "relu#1")] == [2 * 9, 2 * 8]


# ---- calls


def test_calls_of_one_module_are_added_up() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for shift in (-5.0, 0.0, 5.0):
                self.act(x + shift)
            return x

    net = Loop()
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    seen = Looked(net, lambda: net(x))
    assert seen.names == ("act",)
    whole = torch.cat([torch.relu(x + shift) for shift in (-5.0, 0.0, 5.0)])
    assert seen["act"]["mean"] == pytest.approx(float(whole.mean()))
    assert seen["act"]["std"] == pytest.approx(float(whole.std(correction=0)), rel=1e-5)
    assert seen["act"]["max"] == float(whole.max())
    assert seen["act"]["zero_share"] == pytest.approx(float((whole == 0).float().mean()))
    assert seen["act"]["dead_share"] == 0, "every unit fired in the last call"
    assert seen["act"]["positions"] == 9


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda value: F.relu(self.block(value)), x, use_reentrant=reentrant)
            return self.head(y)

    net = Net()
    x = torch.randn(6, 4, requires_grad=True)
    look = Look({id(child): path for path, child in net.named_modules()}, EVERYTHING)
    look.start()
    net(x).sum().backward()  # without a pause: the recomputation runs while everything is watched
    look.pause()
    assert {name: site.positions for name, site in look.sites.items() if site.positions} == {"block.1": 6, "block.relu" if False else "relu": 6}
    assert look.sites["block.0"].elements == 24
    look.stop()


# ---- roles


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), gate

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.gate(self.a(x)))


@pytest.mark.parametrize(("gate", "name"), [(nn.Sigmoid(), "gate"), (torch.sigmoid, "sigmoid"), (torch.tanh, "tanh")])
def test_a_sigmoid_that_multiplies_is_a_gate(gate: Callable[[Tensor], Tensor], name: str) -> None:
    net = Gated(gate)
    assert Looked(net, lambda: net(torch.randn(5, 4))).roles() == {name: "gate"}


def test_a_sigmoid_at_the_end_is_the_output_also_under_its_loss() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1), nn.Sigmoid())
    x = torch.randn(5, 4)
    assert Looked(net, lambda: net(x)).roles() == {"3": "output"}
    seen = Looked(net, lambda: F.binary_cross_entropy(net(x).flatten(), torch.ones(5)))
    assert seen.roles() == {"3": "output"}
    assert [call.kind for call in seen.calls] == ["binary_cross_entropy"]


def test_a_bias_before_a_normalisation_is_seen() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    assert Looked(net, lambda: net(torch.randn(4, 2, 2))).look.before_norm == {"0.bias"}


# ---- inputs


def test_inputs_are_what_enters_from_outside() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 4)
    assert [tensor is x for tensor in Looked(net, lambda: net(x)).inputs] == [True]


def test_inputs_given_by_keyword_and_in_containers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, *, batch: dict[str, Any]) -> dict[str, Any]:
            return {"out": [self.layer(batch["x"])], "nothing": None, "name": "x"}

    net = Net()
    batch = {"x": torch.randn(5, 4), "more": (torch.ones(2), None)}
    seen = Looked(net, lambda: net(batch=batch))
    assert [tensor is expected for tensor, expected in zip(seen.inputs, (batch["x"], batch["more"][0]), strict=True)] == [True, True]
    assert seen.names == ("layer",)


def test_a_metric_is_no_model_and_its_arguments_are_no_inputs() -> None:
    class Accuracy(nn.Module):
        def forward(self, predicted: Tensor, label: Tensor) -> Tensor:
            return (predicted == label).float().mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.accuracy, self.criterion = nn.Linear(4, 3), Accuracy(), nn.CrossEntropyLoss()

    net = Net()
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])

    def step() -> Tensor:
        scores = net.net(x)
        net.accuracy(scores.argmax(1), y)
        return net.criterion(scores, y)

    seen = Looked(net, step)
    assert [tensor is x for tensor in seen.inputs] == [True]
    assert seen.calls[0].label is y


def test_what_a_layer_without_parameters_made_of_the_data_is_the_input() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 255

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = Scale(), nn.Linear(4, 2)

    net = Net()
    x = torch.full((5, 4), 255.0)
    seen = Looked(net, lambda: net.layer(net.scale(x)))
    assert [float(tensor.max()) for tensor in seen.inputs] == [1.0]


# ---- disturbing nothing


def test_outputs_are_never_replaced() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Any:
            return (self.block(x), None, {"again": [torch.sigmoid(self.block(x))]})

    net = Net()
    x = torch.randn(6, 4)
    seen = Looked(net, lambda: net(x)).output
    torch.manual_seed(0)
    bare = net(x)
    assert type(seen) is tuple
    assert seen[1] is None
    assert torch.equal(seen[0], bare[0])
    assert torch.equal(seen[2]["again"][0], bare[2]["again"][0])


def test_gradients_are_the_same_with_in_place_activations() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    Looked(net, lambda: net(x), backward=True)
    seen = [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    net(x).sum().backward()
    assert all(torch.equal(left, right.grad) for left, right in zip(seen, net.parameters(), strict=True))


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.to_sparse(),
        lambda x: x[:0],
        lambda x: x.sum(),
        lambda x: x.to(torch.int64),
        lambda x: torch.complex(x, x),
        lambda x: None,
        lambda x: "text",
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "empty", "0-d", "integer", "complex", "None", "text", "nested", "meta", "float8", "quantised"],
)
@pytest.mark.filterwarnings("ignore")
def test_odd_outputs_are_passed_on(odd: Callable[[Tensor], Any]) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return odd(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x: Tensor) -> Any:
            return self.odd(self.first(x).detach())

    net = Net()
    seen = Looked(net, lambda: net(torch.randn(2, 4)))
    assert "first" in seen.names
    assert seen.look.error is None


def test_an_error_of_ours_stays_inside_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    monkeypatch.setattr(Look, "_reduce", lambda *args: 1 / 0)
    look = Look({id(child): path for path, child in net.named_modules()}, EVERYTHING)
    look.start()
    assert net(torch.randn(2, 4)).shape == (2, 1)
    assert isinstance(look.error, ZeroDivisionError)
    assert left_behind() == []
    look.stop()

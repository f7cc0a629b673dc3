"""Activations beyond their moments: constant outputs, softmax rows, units judged by their input, ranges; buffers that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.left_behind import left_behind
from tests.torch.runs import Driven
from tests.torch.test_look import EVERYTHING_SHORT, Looked
from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.buffers import Buffers
from trainvet.integrations.torch.evaluation import Pooled
from trainvet.integrations.torch.sites import Site, Windows, same_for_all, softmax_rows
from trainvet.meaning import share_inside


class Apply(nn.Module):
    """A function of one hidden layer, whose bias puts every unit at a chosen place."""

    def __init__(self, function: Callable[[Tensor], Any], bias: list[float]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, len(bias))
        with torch.no_grad():
            self.layer.weight.mul_(0.01)
            self.layer.bias.copy_(torch.tensor(bias))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


# ---- numbers


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16], ids=str)
def test_magnitudes_are_numpys(half: torch.dtype) -> None:
    net = nn.Linear(5, 7).to(half)
    x = torch.randn(9, 5, dtype=half)
    seen = Looked(net, lambda: net(x))
    assert seen["Linear"]["abs_mean"] == pytest.approx(net(x).detach().double().abs().mean().item(), rel=1e-5)
    assert seen.look.sites["Linear"].dtype == str(half).removeprefix("torch.")


def test_a_watchpoints_range_is_counted() -> None:
    net = nn.Linear(5, 7)
    x = torch.randn(9, 5)
    key = share_inside("activation", -0.5, 0.25)
    look = Look({id(net): ""}, frozenset({key}))
    look.start()
    out = net(x)
    look.pause()
    names, columns = look.columns(Windows())
    look.stop()
    truth = out.detach().numpy()
    assert names == ("Linear",)
    assert columns[key.partition(".")[2]] == [pytest.approx(((truth >= -0.5) & (truth <= 0.25)).mean())]


# ---- constant outputs


def test_an_output_that_is_the_same_for_all_samples() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        net[0].bias.fill_(-100.0)
    seen = Looked(net, lambda: net(torch.randn(8, 4)))
    assert [seen[name]["constant"] for name in ("0", "1", "2")] == [0, 1, 1]
    seen = Looked(net, lambda: net(torch.randn(1, 4)))
    assert [seen[name]["constant"] for name in ("0", "1", "2")] == [0, 0, 0], "one sample says nothing"


def test_a_network_that_works_is_nowhere_constant() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2), nn.Softmax(-1))
    seen = Looked(net, lambda: net(torch.randn(8, 4)))
    assert {name: seen[name]["constant"] for name in seen.names} == dict.fromkeys(seen.names, 0.0)


def test_what_was_given_the_same_from_outside_may_be_constant() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.norm, self.head = nn.Embedding(9, 4), nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            places = self.norm(self.places(torch.arange(6).expand(len(ids), 6)))
            return self.head(self.words(ids) + places)

    net = Positions()
    seen = Looked(net, lambda: net(torch.randint(9, (5, 6))))
    assert {name: seen[name]["constant"] for name in seen.names} == dict.fromkeys(("places", "norm", "words", "head"), 0.0)
    with torch.no_grad():
        net.words.weight.zero_()
    seen = Looked(net, lambda: net(torch.randint(9, (5, 6))))
    assert (seen["words"]["constant"], seen["places"]["constant"], seen["head"]["constant"]) == (1, 0, 1)


def test_the_first_axis_must_be_the_samples() -> None:
    """A recurrent network that has its time first is the same at all times where its batch is one constant sample."""
    site = Site("a", "a", "Linear", "", 0, (6, 5, 3), constant=1.0, elements=90)
    assert site.cell(Windows(), 5).get("constant", 0.0) == 0.0
    assert site.cell(Windows(), 3)["constant"] == 1.0, "samples and positions laid end to end"
    assert "constant" not in site.cell(Windows(), 0)


def test_equality_of_samples() -> None:
    same, nearly = torch.ones(4, 3), torch.ones(4, 3)
    nearly[3, 2] += 1e-6
    assert (same_for_all(same), same_for_all(nearly), same_for_all(same[:1]), same_for_all(torch.tensor(1.0))) == (1.0, 0.0, 0.0, 0.0)
    assert same_for_all(torch.full((3, 2), float("nan"))) == 0.0


# ---- softmax


SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(1),
    "module": nn.Softmax(-1),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_entropy_and_logits_of_a_softmax(name: str) -> None:
    net = Apply(SOFTMAX[name], [3.0, -7.5, 0.0, 1.0])
    x = torch.randn(6, 3)
    seen = Looked(net, lambda: net(x))
    got, truth = seen[seen.names[1]], net(x).detach().double().numpy()
    assert got["entropy"] == pytest.approx((-(truth * np.log(truth)).sum(1) / np.log(4)).mean(), rel=1e-4)
    assert got["input_abs_max"] == pytest.approx(net.layer(x).detach().abs().max().item(), rel=1e-6)
    assert seen.look.sites[seen.names[1]].function == "softmax"
    assert seen["layer"]["entropy"] == 0


def test_masked_entries_cannot_be_chosen() -> None:
    logits = torch.tensor([[1.0, 1.0, float("-inf"), -1e9], [5.0, float("-inf"), float("-inf"), float("-inf")], [2.0, 2.0, 2.0, 2.0]])
    rows, entropy, peak = softmax_rows(logits, logits.softmax(-1), -1)
    assert (rows, entropy, peak) == (2, pytest.approx(2.0), 5.0), "one row has no choice; the large number is a mask"


def test_entropy_is_put_together_over_calls_and_other_axes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.soft = nn.Softmax(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.soft(x) + self.soft(10 * x)

    net, x = Twice(), torch.randn(5, 3)
    seen = Looked(net, lambda: net(x))
    both = [torch.softmax(factor * x.double(), 0).numpy() for factor in (1, 10)]
    assert seen["soft"]["entropy"] == pytest.approx(np.mean([-(p * np.log(p)).sum(0) / np.log(5) for p in both]), rel=1e-4)
    assert seen["soft"]["input_abs_max"] == pytest.approx(10 * x.abs().max().item(), rel=1e-6)


class Attention(nn.Module):
    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.weigh, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), weigh, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(self.drop(F.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)), self.v(x))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "weigh",
    [torch.matmul, torch.bmm, lambda a, v: a @ v, lambda a, v: torch.einsum("bij,bjk->bik", a, v)],
    ids=["matmul", "bmm", "@", "einsum"],
)
def test_a_softmax_that_weighs_values_is_attention(weigh: Callable[[Tensor, Tensor], Tensor], dropout: float) -> None:
    net = Attention(weigh, dropout)
    seen = Looked(net, lambda: net(torch.randn(2, 3, 4)))
    assert seen.roles() == {"softmax": "attention"}
    assert not seen.look.fused_attention


def test_a_softmax_at_the_end_is_the_output() -> None:
    net = Apply(lambda x: F.softmax(x, -1), [0.0, 1.0])
    assert Looked(net, lambda: net(torch.randn(5, 3))).roles() == {"softmax": "output"}


def test_attention_inside_one_call_is_said_to_be_hidden() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.line(x), self.line(x), x)

    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.many(x, x, x)[0]

    for net in (Fused(), Multi()):
        run = Driven(net, torch.optim.SGD(net.parameters(), lr=0.1), every=1)
        run.step(torch.randn(2, 3, 4))
        run.step(torch.randn(2, 3, 4))
        assert "inside one call" in run.seen.plans[-1].unobservable["activation.entropy"]
        run.end()
    run = Driven(net := Attention(torch.matmul), torch.optim.SGD(net.parameters(), lr=0.1), every=1)
    run.step(torch.randn(2, 3, 4))
    run.end()
    assert "activation.entropy" not in run.seen.plans[-1].unobservable


# ---- units judged by their input

BENT: dict[str, tuple[Callable[[Tensor], Tensor], str, float]] = {
    "F.gelu": (F.gelu, "gelu", -3), "nn.GELU": (nn.GELU(), "gelu", -3), "F.silu": (F.silu, "silu", -6), "nn.SiLU": (nn.SiLU(), "silu", -6),
    "nn.SiLU in place": (nn.SiLU(inplace=True), "silu", -6), "F.silu in place": (lambda x: F.silu(x, inplace=True), "silu", -6),
    "F.elu": (F.elu, "elu", -3), "nn.ELU in place": (nn.ELU(inplace=True), "elu", -3), "F.selu": (F.selu, "selu", -3),
    "nn.SELU": (nn.SELU(), "selu", -3), "torch.selu_": (torch.selu_, "selu", -3), "F.leaky_relu": (F.leaky_relu, "leaky_relu", 0),
    "nn.LeakyReLU in place": (nn.LeakyReLU(inplace=True), "leaky_relu", 0), "F.elu_": (F.elu_, "elu", -3), "nn.PReLU": (nn.PReLU(), "prelu", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_a_unit_is_dead_below_the_flat_part_of_its_function(name: str) -> None:
    function, known, limit = BENT[name]
    net = Apply(function, [limit - 0.5, limit - 0.5, limit + 0.5, 2.0])
    seen = Looked(net, lambda: net(torch.randn(7, 3).clamp(-2, 2)))
    assert len(seen.names) == 2
    site = seen.names[1]
    assert seen.look.sites[site].function == known
    assert (seen[site]["dead_share"], seen[site]["positions"], seen[site]["batches"]) == (0.5, 7, 1)


def test_channels_of_a_convolution_are_the_units_of_what_follows() -> None:
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.GELU())
    with torch.no_grad():
        net[0].bias[:2] = -20
    seen = Looked(net, lambda: net(torch.randn(2, 1, 6, 6)))
    assert (seen["1"]["dead_share"], seen["1"]["positions"]) == (pytest.approx(0.4), 2 * 4 * 4)


def test_keeping_the_input_of_an_activation_in_place_changes_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(inplace=True), nn.Linear(8, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    Looked(net, lambda: net(x), backward=True)
    seen = [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    net(x).sum().backward()
    assert all(torch.equal(left, right.grad) for left, right in zip(seen, net.parameters(), strict=True))
    assert left_behind() == []


# ---- buffers


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([1.0, float("-inf"), float("nan")]))
        self.register_buffer("large", torch.full((300, 300), 2.0))
        self.register_buffer("narrow", torch.full((3,), 0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.line(x))


@pytest.mark.parametrize("half", [False, True])
def test_buffers_that_changed_since_the_sample_before(half: bool) -> None:
    net = Kept()
    if not half:
        del net._buffers["narrow"]  # then all lies in plain host memory
    run = Driven(net, torch.optim.SGD(net.parameters(), lr=0.1), every=1)
    for index in range(4):
        if index == 2:
            net.get_buffer("large")[-1, -1] += 1.0
        if index == 3:
            net.norm.eval()
        run.step(torch.randn(8, 4))
    run.end()
    changed, rms = run.seen.sampled("buffer.changed"), run.seen.sampled("buffer.rms")
    names = [name for name in changed[0] if name != "narrow"]
    assert names == ["mask", "large", "norm.running_mean", "norm.running_var"]
    assert [[changed[step][name] for name in names] for step in range(4)] == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert rms[0]["large"] == pytest.approx(2.0)
    truth = net.norm.running_var.double().square().mean().sqrt().item()  # type: ignore[union-attr]
    assert rms[3]["norm.running_var"] == pytest.approx(truth, rel=1e-5)
    if half:
        assert (rms[0]["narrow"], changed[3]["narrow"]) == (0.5, 0)


# ---- on a device


def test_nothing_waits_for_a_device() -> None:
    """Meta tensors have no values: whatever reads one on the host raises."""
    want = EVERYTHING_SHORT | {share_inside("activation", 0, 1).partition(".")[2]}
    for function in ("softmax", "gelu", "relu", ""):
        site = Site("a", "a", "X", function, 0, (4, 3))
        given = torch.randn(4, 3, device="meta")
        for _ in range(2):
            site.add(given * 2, -1, want, given, -1)
        site.constant = same_for_all(given)
        cell = site.cell(Windows(), 4)
        assert isinstance(cell["abs_mean"], Tensor)
        assert isinstance(cell["constant"], Tensor)
        if function == "softmax":
            assert isinstance(cell["entropy"], Tensor)
            assert isinstance(cell["input_abs_max"], Tensor)
        elif function:
            assert isinstance(cell["dead_share"], Tensor)
    memory = Buffers()
    buffers = {"small": torch.zeros(3, device="meta"), "large": torch.zeros(70_000, device="meta")}
    assert all(flag.device.type == "meta" for _ in range(2) for flag in memory._changed(buffers))
    pooled = Pooled()
    for _ in range(2):
        pooled.add(torch.zeros(3, 2, device="meta"))
    assert isinstance(pooled.mean, Tensor)


@pytest.mark.parametrize("half", [torch.float32, torch.float16], ids=str)
def test_softmax_rows_of_wide_and_narrow_numbers(half: torch.dtype) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(half)
    logits[1, 2] = float("-inf")
    host = softmax_rows(logits.float(), logits.float().softmax(-1), -1)
    truth = logits.double().softmax(-1).numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = np.nansum(-truth * np.log(truth), axis=1) / np.log((truth > 0).sum(1))
    assert host == (5, pytest.approx(entropy.sum(), rel=1e-5), pytest.approx(float(logits[torch.isfinite(logits)].abs().max())))


@pytest.mark.parametrize(
    ("shape", "dim", "batch", "expected"),
    [
        ((8, 4, 4), 0, 8, 1.0),
        ((8, 4, 4), -3, 8, 1.0),
        ((8, 4, 4), -1, 8, 0.0),
        ((5, 8, 3), 0, 8, 0.0),
        ((8, 8, 3), 0, 8, 0.0),
        ((8,), 0, 8, 0.0),
        ((8, 4), 0, 0, 0.0),
    ],
)
def test_a_softmax_along_the_axis_of_the_samples(shape, dim, batch, expected):
    """A sequence-first tensor has the samples on another axis; where both are equally long nothing can be said."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    site = Site("attend", "", "function", "softmax", 0, shape)
    site.add(given.softmax(dim), -1, frozenset({"batch_axis"}), given, dim)
    assert site.cell(Windows(), batch).get("batch_axis", 0.0) == expected

"""What a sampled forward shows of the model: calls and modes of modules, layers and what they are given, sharing, ties, loaded weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.left_behind import left_behind
from tests.torch.runs import Driven, net, steps
from trainvet.integrations.torch.layers import broken_ties, initial, pretrained
from trainvet.integrations.torch.modules import Calls
from trainvet.integrations.torch.probe import Known
from trainvet.statistics import Layer


def driven(module: nn.Module, x: Tensor | None = None, count: int = 1, **arguments: Any) -> Driven:
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.01), every=1, **arguments)
    for _ in range(count):
        run.step(torch.randn(8, 4) if x is None else x)
    assert left_behind(module) == []
    return run


def layers(run: Driven) -> dict[str, Layer]:
    return {layer.name: layer for layer in run.seen.plans[-1].layers}


# ---- the table "module"


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.twice, self.unused, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.act(self.drop(self.norm(self.stem(x)))))) * self.scale


def test_calls_and_modes_of_modules() -> None:
    module = Parts()
    run = driven(module)
    module.norm.eval()
    run.step(torch.randn(6, 4))
    run.end()
    assert run.seen.sampled("module.called")[0] == {"Parts": 1, "stem": 1, "norm": 1, "drop": 1, "twice": 2, "unused": 0}
    assert [row["norm"] for row in run.seen.sampled("module.training").values()] == [1, 0]
    assert [row["drop"] for row in run.seen.sampled("module.training").values()] == [1, 1]
    assert [row["norm"] for row in run.seen.sampled("module.samples").values()] == [8, 0]
    known = {item.name: item for item in run.seen.plans[-1].subjects if item.kind == "module"}
    assert known["norm"].module_type == "BatchNorm1d"
    assert known["unused"].trainable
    assert not known["drop"].trainable


@pytest.mark.parametrize(("module", "shape", "values", "samples"), [(nn.BatchNorm2d(3), (2, 3, 5, 5), 50, 2), (nn.BatchNorm1d(4), (1, 4, 6), 6, 1)])
def test_values_a_normalisation_has_per_channel(module: nn.Module, shape: tuple[int, ...], values: int, samples: int) -> None:
    run = driven(module, torch.randn(shape))
    name = type(module).__name__
    assert run.seen.sampled("module.values")[0] == {name: values}
    assert run.seen.sampled("module.samples")[0] == {name: samples}


def test_a_parameter_that_is_used_without_its_module_being_called_has_no_row() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.list, self.idle = nn.MultiheadAttention(4, 2), nn.ParameterList([torch.ones(4)]), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.many(x, x, x, need_weights=False)[0] * self.list[0]

    run = driven(Net())
    assert run.seen.sampled("module.called")[0] == {"many": 1, "idle": 0}


def test_calls_of_all_micro_batches_count() -> None:
    module = net()
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.01), every=1)
    for index in range(3):
        run.probe.forward((), index, 0)
        loss = module(torch.randn(4 + index, 4)).square().mean()
        run.probe.loss(loss)
        loss.backward()
        if index < 2:
            run.probe.updated()
            with torch.no_grad():
                module.eval()(torch.randn(2, 4))  # a validation in between
                module.train()
    run.observe(run.probe.gradients(run.optimizers[0]))
    run.optimizers[0].step()
    run.probe.updated()
    run.observe(run.probe.poll(drain=True))
    assert set(run.seen.sampled("module.called")[0].values()) == {3}
    assert set(run.seen.sampled("module.training")[0].values()) == {1}
    assert run.seen.sampled("module.samples")[0]["1"] == 4, "the smallest batch"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_part_is_called_once(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x.requires_grad_(), use_reentrant=reentrant))

    run = driven(Net(), count=2)
    run.end()
    assert run.seen.sampled("module.called")[1] == {"block.0": 1, "head": 1}
    assert run.seen.plans[-1].disconnected == ()


def test_two_optimizers_in_one_batch_have_one_table_of_it() -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in module]
    run = Driven(module, optimizers, every=1, known=Known(manual_optimization=True))
    run.probe.forward((), 0, 0)
    for index in (0, 1):
        loss = module[index](torch.randn(3, 4)).square().mean()  # type: ignore[index]
        run.probe.loss(loss)
        loss.backward()
        run.observe(run.probe.gradients(optimizers[index]))
        optimizers[index].step()
    run.probe.updated()
    run.observe(run.probe.poll(drain=True))
    assert run.seen.sampled("module.called") == {1: {"0": 1, "1": 1}}, "with the last attempt, when all has been called"


def test_a_forward_that_does_not_show_gives_no_table() -> None:
    module = net()
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
    loss = module(torch.randn(8, 4)).square().mean()
    run.probe.forward((), 0, 0, module)
    run.probe.loss(loss)
    loss.backward()
    run.observe(run.probe.gradients(run.optimizers[0]))
    run.probe.updated()
    run.observe(run.probe.poll(drain=True))
    assert run.seen.sampled("module.called") == {}
    assert run.seen.plans[-1].layers == ()


def test_an_error_of_ours_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "_count", lambda *args: 1 / 0)
    run = driven(net(), count=2)
    assert len(run.monitor.errors) == 1
    assert sorted(run.seen.series("loss.value")) == [0, 1]


# ---- layers


class Every(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8, padding_idx=0)
        self.many = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.conv, self.norm = nn.Conv1d(8, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6, momentum=0.3)
        self.act, self.flat = nn.ReLU(inplace=True), nn.Flatten()
        self.a, self.b, self.drop, self.c = nn.Linear(30, 16), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 3)
        self.lstm, self.last = nn.LSTM(8, 5, bidirectional=True, batch_first=True), nn.LayerNorm(10)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        h = words + self.many(words, words, words)[0]
        h = self.act(self.norm(self.conv(h.transpose(1, 2))))
        h = self.b(self.a(self.flat(h)).view(-1, 16))
        return self.c(self.drop(F.relu(h))).sum() + self.last(self.lstm(words)[0]).sum()


def test_layers_as_the_forward_shows_them() -> None:
    run = driven(Every(), torch.randint(0, 10, (4, 5)))
    found = layers(run)
    assert {name: layer.after for name, layer in found.items() if layer.after} == {
        "many": ("words",), "norm": ("conv",), "act": ("norm",), "flat": ("act",), "a": ("act",), "b": ("a",), "c": ("drop",), "lstm": ("words",),
        "last": ("lstm",),
    }  # fmt: skip
    kinds = {name: layer.kind for name, layer in found.items()}
    assert kinds == {
        "words": "embedding", "many": "attention", "conv": "convolution", "norm": "batch_norm", "act": "activation", "flat": "other", "a": "linear",
        "b": "linear", "drop": "dropout", "c": "linear", "lstm": "recurrent", "last": "norm", "many.out_proj": "linear",
    }  # fmt: skip
    assert (found["act"].function, found["a"].function) == ("relu", "")
    widths = {name: (layer.width_in, layer.width_out) for name, layer in found.items() if layer.width_in}
    assert widths == {
        "words": (10, 8), "many": (8, 8), "conv": (8, 6), "norm": (6, 6), "a": (30, 16), "b": (16, 16), "c": (16, 3), "lstm": (8, 10),
        "last": (10, 10), "many.out_proj": (8, 8),
    }  # fmt: skip
    assert {name for name, layer in found.items() if not layer.bias} == {"words", "conv", "act", "flat", "drop"}
    assert (found["drop"].rate, found["many"].rate, found["norm"].momentum) == (0.2, 0.1, pytest.approx(0.7))
    assert [layer.name for layer in run.seen.plans[-1].layers if layer.depth >= 0] == list(found)[:-1]
    assert found["many.out_proj"].depth == -1
    assert (found["a"].owns, found["a"].trainable, found["drop"].owns) == (True, True, False)


def test_what_lies_between_two_layers_hides_the_first() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(a + x)
            b.relu_()  # in place: the tensor is the same, its value is not
            c = self.c(b)
            d = self.d(c[:, [0, 1, 2, 3]])
            return self.e(d.reshape(2, -1, 4).permute(1, 0, 2).contiguous().to(torch.float64).to(torch.float32))

    found = layers(driven(Net()))
    assert {name: layer.after for name, layer in found.items()} == {"a": (), "b": (), "c": (), "d": (), "e": ("d",)}


def test_frozen_layers_and_integers() -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)  # type: ignore[index]
    found = layers(driven(module))
    assert (found["0"].trainable, found["0"].owns, found["1"].after) == (False, True, ())


def test_a_transformer_with_dictionaries() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": self.head(self.core(batch["x"]))}

    module = Net()
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
    run.step({"x": torch.randn(3, 5, 8)}, lambda out: out["scores"].square().mean())  # type: ignore[arg-type, index]
    run.end()
    found = layers(run)
    assert found["core.linear1"].after == ("core.norm1",)
    assert found["core.linear2"].after == ("core.dropout",)
    assert found["head"].after == ("core.norm2",)
    assert "core.self_attn.out_proj" not in run.seen.sampled("module.called")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_seen(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return self.line(x).float()

    run = driven(Net())
    facts = run.seen.plans[-1]
    assert facts.autocast == str(dtype).removeprefix("torch.")
    assert facts.of("activation")["line"].dtype == facts.autocast
    assert driven(net()).seen.plans[-1].autocast == ""


# ---- sharing and ties


def test_a_module_that_hangs_in_two_places_and_runs_in_both_is_shared() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert driven(nn.Sequential(block, nn.Linear(4, 4), block)).seen.plans[-1].shared_modules == ("0 = 2",)


def test_no_sharing_to_speak_of() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, act = nn.Linear(4, 4), nn.ReLU()
            self.penalty = nn.ModuleDict({"of": self.inner})  # a second reference
            self.twice = nn.Linear(4, 4)
            self.one, self.two = act, act

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.twice(self.twice(self.one(self.inner(x)))))

    assert driven(Wrapped()).seen.plans[-1].shared_modules == ()


class Language(nn.Module):
    """In the way of transformers."""

    def __init__(self, keys: Any, tied: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self._tied_weights_keys = keys
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("keys", [["head.weight"], {"head.weight": "words.weight"}], ids=["list", "dict"])
def test_a_declared_tie_that_does_not_hold(keys: Any) -> None:
    assert broken_ties(nn.ModuleDict({"lm": Language(keys, True)})) == ("lm.head.weight = lm.words.weight",)
    assert broken_ties(Language(keys, False)) == ()
    tied = Language(keys, True)
    tied.head.weight = tied.words.weight
    assert broken_ties(tied) == ()
    run = driven(tied, torch.randint(10, (3, 5)))
    assert run.seen.plans[-1].broken_ties == ()
    assert run.seen.plans[-1].disconnected == ()


def test_patterns_and_missing_parts_are_no_broken_ties() -> None:
    assert broken_ties(Language({r"layers\.\d+\.weight": "words.weight", "decoder.weight": "words.weight"}, True)) == ()


# ---- loaded weights


def test_weights_that_were_certainly_loaded() -> None:
    fresh = net()
    assert not pretrained(fresh)
    trained = net()
    trained(torch.randn(8, 4))
    fresh.load_state_dict(trained.state_dict())
    assert pretrained(fresh), "its batch counter stands at 1"
    norms = nn.Sequential(nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.LayerNorm(4))
    assert not pretrained(norms)
    for module in norms.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                nn.init.normal_(parameter)
    assert pretrained(norms)
    nn.init.constant_(norms[0].bias, 0.1)
    assert not pretrained(norms), "a constant is an initialisation"
    assert driven(trained).seen.plans[0].pretrained


def test_a_new_plan_is_traced_again() -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 4))
    run = driven(module)
    assert layers(run)["1"].after == ("0",)
    module.append(nn.Linear(4, 2))  # type: ignore[operator]
    run.optimizers[0].add_param_group({"params": list(module[2].parameters())})  # type: ignore[index]
    steps(run, 2)
    run.end()
    assert layers(run)["2"].after == ("1",)
    assert run.seen.sampled("module.called")[2]["2"] == 1


def test_a_teacher_in_evaluation_mode_is_no_part_of_the_training_forward() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
            self.teacher.eval()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = self.teacher(x)
            return self.student(x) - goal

    module = Distilled()
    run = driven(module)
    assert run.seen.sampled("module.training")[0] == {"student.0": 1, "student.1": 1}
    module.student.eval()
    run.step(torch.randn(6, 4))
    assert run.seen.sampled("module.training")[1] == {"student.0": 0, "student.1": 0}


def test_layers_that_only_a_later_optimizer_needs_are_traced_too() -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in module]
    run = Driven(module, optimizers, every=1, known=Known(manual_optimization=True))
    for batch in range(2):
        run.probe.forward((), batch, 0)
        for index in (0, 1):
            x = torch.randn(3, 4)
            loss = (module(x) if index else module[0](x)).square().mean()  # type: ignore[index]
            run.probe.loss(loss)
            loss.backward()
            run.observe(run.probe.gradients(optimizers[index]))
            optimizers[index].step()
        run.probe.updated()
        run.observe(run.probe.poll())
    run.end()
    assert layers(run)["1"].after == ("0",)
    assert left_behind(module) == []


def test_frozen_layers_with_the_weights_they_were_built_with() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Conv1d(4, 16, 3), nn.Linear(32, 32), nn.Linear(32, 32))
    for index in (0, 1, 2):
        net[index].requires_grad_(False)
    with torch.no_grad():
        net[2].weight += 0.02 * torch.randn(32, 32)
    assert initial(net) == ("0", "1")


def test_a_convolution_of_each_channel_by_itself_is_of_another_type() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 1, groups=4), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 1, 1), nn.Conv1d(1, 1, 1))
    types = {name: layer.type for name, layer in layers(driven(model, torch.ones(2, 2, 3))).items()}
    assert list(types.values()) == ["Conv1d", "DepthwiseConv1d", "Conv1d", "Conv1d", "Conv1d"]

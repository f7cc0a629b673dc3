"""Inputs, labels, predictions and losses as they are seen in tiny real runs of Lightning."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning.runs import half, trainer
from tests.torch.left_behind import left_behind
from tests.torch.runs import Everything
from trainvet.callbacks.lightning import Diagnostics


class Model(pl.LightningModule):
    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net, self.criterion = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(make: Callable[[torch.Generator], Any], count: int = 4) -> Any:
    """One batch each time, as it was made."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader([make(generator) for _ in range(count)], batch_size=None)  # type: ignore[arg-type]


def run(directory: Path, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], data: Any, **settings: Any) -> Everything:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    seen = Everything()
    module, diagnostics = Model(net, loss), Diagnostics(log_dir=directory, select=[], rules=[seen])  # type: ignore[list-item]
    fit = trainer(directory, [diagnostics], **{"max_epochs": 1, **settings})
    with contextlib.suppress(IndexError):
        fit.fit(module, data)
    assert diagnostics.report.errors == ()
    assert left_behind(module, fit.optimizers) == []
    return seen


def rows(count: int, features: int, classes: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda generator: (torch.randn(count, features, generator=generator), torch.randint(0, classes, (count,), generator=generator))


def last(seen: Everything, key: str) -> dict[str, float]:
    sampled = seen.sampled(key)
    return sampled[max(sampled)]


def facts(seen: Everything) -> Any:
    return seen.plans[-1]


NET = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}, {"plugins": [half()]}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_classifier(tmp_path: Path, settings: dict[str, Any]) -> None:
    seen = run(tmp_path, NET, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), batches(rows(8, 6, 3)), **settings)
    (loss,) = facts(seen).losses
    assert (loss.kind, loss.function, loss.expects, loss.classes, loss.samples) == ("cross_entropy", "cross_entropy", "logits", 3, 8)
    assert (loss.output_function, loss.output_layer, loss.label, loss.output) == ("linear", "net.2", "label", "output")
    assert last(seen, "output.units") == {"output": 3}
    assert last(seen, "output.samples") == {"output": 8}
    assert last(seen, "label.seen") == {"label": 16 if "accumulate_grad_batches" in settings else 32}
    assert last(seen, "label.classes") == {"label": 3}
    assert last(seen, "input.count") == {"input": 8}
    assert last(seen, "label.pairs") == {"label": 0}
    prints = [row["input"] for row in seen.sampled("input.fingerprint").values()]
    assert len(set(prints)) == len(prints)
    output = facts(seen).of("output")["output"]
    assert (output.module, output.function, output.shape) == ("net.2", "linear", (8, 3))
    assert output.dtype == ("bfloat16" if "precision" in settings else "float16" if "plugins" in settings else "float32")
    assert not facts(seen).balanced


def test_the_numbers_are_those_of_the_tensors(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def loss(net: nn.Module, batch: Any) -> Tensor:
        kept.append(net(batch[0]))
        return F.cross_entropy(kept[-1], batch[1])

    seen = run(tmp_path, NET, loss, batches(rows(8, 6, 3)))
    for step, prediction in enumerate(kept):
        truth = prediction.detach().double()
        assert seen.sampled("output.std")[step]["output"] == pytest.approx(float(truth.std(correction=0)), rel=1e-4)
        assert seen.sampled("output.log_normalizer")[step]["output"] == pytest.approx(float(truth.logsumexp(1).abs().mean()), rel=1e-4)
    for step, batch in enumerate(batches(rows(8, 6, 3))):
        assert seen.sampled("input.abs_mean")[step]["input"] == pytest.approx(float(batch[0].abs().double().mean()), rel=1e-4)


def test_the_same_batch_again_is_known_and_so_are_its_samples(tmp_path: Path) -> None:
    one = rows(8, 6, 3)(torch.Generator().manual_seed(3))
    seen = run(tmp_path, NET, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), DataLoader([one] * 3, batch_size=None))  # type: ignore[arg-type]
    assert len({row["input"] for row in seen.sampled("input.fingerprint").values()}) == 1
    assert [row["label"] for row in seen.sampled("label.pairs").values()] == [0, 8, 16]
    assert last(seen, "label.contradictions") == {"label": 0}


def test_double_softmax_shows_in_the_numbers_and_in_the_loss(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=-1))
    seen = run(tmp_path, net, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), batches(rows(8, 6, 3)))
    assert last(seen, "output.simplex_share") == {"output": 1}
    assert (facts(seen).losses[0].output_function, facts(seen).losses[0].output_axis) == ("softmax", 1)


def test_smoothing_weights_and_ignored_labels(tmp_path: Path) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 4.0]), label_smoothing=0.1, ignore_index=0)
    seen = run(tmp_path, NET, lambda net, batch: criterion(net(batch[0]), batch[1]), batches(rows(8, 6, 3)))
    loss = facts(seen).losses[0]
    assert (loss.weighted, loss.smoothed) == (True, True)
    assert facts(seen).balanced
    assert min(row["label"] for row in seen.sampled("label.min").values()) == 1
    assert last(seen, "label.out_of_range") == {"label": 0}
    assert last(seen, "label.classes") == {"label": 2}


def test_weights_of_samples_balance(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return (F.cross_entropy(net(batch[0]), batch[1], reduction="none") * torch.tensor([1.0, 2.0, 3.0])[batch[1]]).mean()

    seen = run(tmp_path, NET, loss, batches(rows(8, 6, 3)))
    assert facts(seen).balanced
    assert (facts(seen).losses[0].kind, facts(seen).losses[0].expects) == ("unknown", "logits")


def test_soft_labels(tmp_path: Path) -> None:
    seen = run(tmp_path, NET, lambda net, batch: F.cross_entropy(net(batch[0]), 0.9 * F.one_hot(batch[1], 3) + 0.1 / 3), batches(rows(8, 6, 3)))
    assert last(seen, "label.classes") == {"label": 3}
    assert last(seen, "label.out_of_range") == {"label": 0}
    assert 0 < last(seen, "label.entropy")["label"] <= math.log(3)


def test_binary_and_multi_label(tmp_path: Path) -> None:
    def one(net: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy(net(batch[0])[:, 0].sigmoid(), (batch[1] > 0).float())

    seen = run(tmp_path / "one", NET, one, batches(rows(8, 6, 3)))
    loss = facts(seen).losses[0]
    assert (loss.kind, loss.expects, loss.output_function, loss.output_layer) == ("binary_cross_entropy", "probabilities", "sigmoid", "net.2")
    assert last(seen, "output.units") == {"output": 1}
    assert last(seen, "label.classes") == {"label": 2}

    def several(net: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(net(batch[0]), F.one_hot(batch[1], 3).float())

    seen = run(tmp_path / "several", NET, several, batches(rows(8, 6, 3)))
    assert last(seen, "output.units") == {"output": 3}
    assert seen.sampled("label.classes") == {}
    assert last(seen, "label.out_of_range") == {"label": 0}


def test_segmentation_and_batches_in_dictionaries(tmp_path: Path) -> None:
    def make(generator: torch.Generator) -> Any:
        return {"image": torch.randn(2, 3, 4, 4, generator=generator), "meta": {"mask": torch.randint(0, 5, (2, 4, 4), generator=generator)}}

    net = nn.Sequential(nn.Conv2d(3, 5, 1), nn.LogSoftmax(dim=1))
    seen = run(tmp_path, net, lambda net, batch: F.nll_loss(net(batch["image"]), batch["meta"]["mask"]), batches(make))
    loss = facts(seen).losses[0]
    assert (loss.expects, loss.output_function, loss.output_axis, loss.classes, loss.samples) == ("log_probabilities", "log_softmax", 1, 5, 32)
    assert last(seen, "output.log_simplex_share") == {"output": 1}
    assert last(seen, "output.samples") == {"output": 32}
    assert last(seen, "label.seen") == {"label": 128}


def test_regression(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 1), nn.ReLU())
    seen = run(tmp_path, net, lambda net, batch: F.mse_loss(net(batch[0]).squeeze(1), 100 * batch[0][:, 0]), batches(rows(8, 6, 3)))
    loss = facts(seen).losses[0]
    assert (loss.kind, loss.expects, loss.output_function, loss.output_layer) == ("regression", "values", "relu", "net.1")
    assert (last(seen, "output.units"), last(seen, "output.samples")) == ({"output": 1}, {"output": 8})
    assert last(seen, "label.min")["label"] < 0 <= last(seen, "output.min")["output"]
    assert seen.sampled("label.classes") == {}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.kind(hidden), self.size(hidden)


def test_several_losses(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        kind, size = net(batch[0])
        return F.cross_entropy(kind, batch[1]) + 0.1 * F.mse_loss(size[:, 0], batch[0][:, 0])

    seen = run(tmp_path, Heads(), loss, batches(rows(8, 6, 3)))
    described = {item.output: item for item in facts(seen).losses}
    assert set(described) == {"output.0", "output.1"}
    assert (described["output.0"].expects, described["output.0"].output_layer) == ("logits", "net.kind")
    assert (described["output.1"].expects, described["output.1"].label) == ("values", "label.1")
    assert {item.kind for item in facts(seen).losses if item.name == "loss"} == {"unknown"}, "neither is the whole of it"
    assert last(seen, "output.units") == {"output.0": 3, "output.1": 1}
    assert last(seen, "label.classes")["label.0"] == 3
    assert math.isnan(last(seen, "label.classes")["label.1"])


def test_an_auto_encoder_has_an_input_and_a_label(tmp_path: Path) -> None:
    seen = run(tmp_path, nn.Linear(6, 6), lambda net, batch: F.mse_loss(net(batch[0]), batch[0]), batches(rows(8, 6, 3)))
    assert last(seen, "input.std")["input"] == last(seen, "label.std")["label"] > 0


def test_a_squared_error_written_by_hand_is_a_regression(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return ((net(batch[0])[:, 0] - 100 * batch[0][:, 0]) ** 2).mean()

    seen = run(tmp_path, NET, loss, batches(rows(8, 6, 3)))
    (found,) = facts(seen).losses
    assert (found.name, found.kind, found.expects, found.output_layer, found.samples) == ("loss", "regression", "values", "net.2", 8)
    assert last(seen, "label.abs_mean")["label"] > 20
    assert len(seen.sampled("output.std")) == 4


def test_a_squared_error_that_is_only_a_part_of_a_loss_is_none(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        whole = ((net(batch[0])[:, 0] - batch[0][:, 0]) ** 2).mean()
        return whole + net(batch[0]).abs().mean()

    seen = run(tmp_path, NET, loss, batches(rows(8, 6, 3)))
    assert facts(seen).losses == ()
    assert seen.sampled("output.std") == {}


def test_a_loss_written_by_hand_is_unknown_and_has_no_output(tmp_path: Path) -> None:
    seen = run(tmp_path, NET, lambda net, batch: (net(batch[0]) - 1).abs().mean(), batches(rows(8, 6, 3)))
    assert facts(seen).losses == ()
    assert seen.sampled("output.std") == {}
    assert last(seen, "input.count") == {"input": 8}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens))


def sentences(high: int) -> Callable[[torch.Generator], Any]:
    def make(generator: torch.Generator) -> Any:
        tokens = torch.randint(1, high, (4, 8), generator=generator)
        tokens[:, 5:] = 0
        return tokens

    return make


def predict(net: nn.Module, tokens: Any) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).reshape(-1, 9), tokens[:, 1:].reshape(-1), ignore_index=0)


def test_a_model_of_tokens(tmp_path: Path) -> None:
    seen = run(tmp_path, Tokens(), predict, batches(sentences(9)))
    assert last(seen, "input.padding_share")["input"] == pytest.approx(2 / 7)
    assert last(seen, "input.integers") == {"input": 1}
    assert seen.sampled("input.channel_std_max") == {}
    assert facts(seen).of("input")["input"].module == "net.words"
    assert facts(seen).of("input")["input"].dtype == "int64"
    names = dict(last(seen, "module.index_max"))
    assert names["net.words"] < 9
    assert math.isnan(names["net.head"])
    assert last(seen, "label.seen") == {"label": 4 * 4 * 4}
    assert last(seen, "label.min")["label"] >= 1


@pytest.mark.parametrize("faulty", [0, 2, 14])
def test_an_index_out_of_range_is_told_though_the_forward_raises(tmp_path: Path, faulty: int) -> None:
    good, bad = batches(sentences(9), 16).dataset, sentences(30)(torch.Generator().manual_seed(1))
    data = [bad if index == faulty else batch for index, batch in enumerate(good)]
    seen = run(tmp_path, Tokens(), predict, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    final = seen.seen[-1]
    assert final.step == faulty
    assert float(final.values("module.index_max", ("net.words",))[0]) == int(bad[:, :-1].max()) >= 9


def test_a_label_out_of_range_is_told_though_the_loss_raises(tmp_path: Path) -> None:
    seen = run(tmp_path, NET, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1] + 1), batches(rows(8, 6, 3)))
    final = seen.seen[-1]
    assert final.step == 0
    assert float(final.values("label.out_of_range", ("label",))[0]) > 0
    assert facts(seen).losses[0].classes == 3


def test_a_loss_that_joins_later_has_a_name_of_its_own_and_changes_no_other(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        kind, size = net(batch[0])
        whole = F.cross_entropy(kind, batch[1])
        return whole + F.mse_loss(size[:, 0], batch[0][:, 0]) if float(batch[0][0, 0]) > 0 else whole

    seen = run(tmp_path, Heads(), loss, batches(rows(8, 6, 3), 8))
    told = {name for row in seen.sampled("output.std").values() for name in row}
    assert told == {"output", "output.1"}
    assert {"output", "output.1"} <= set(facts(seen).of("output"))
    assert facts(seen).losses[0].output == "output"
    assert len(seen.plans) <= 4


def test_an_empty_label_is_no_news(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1]) + F.mse_loss(net(batch[0][:0]), torch.zeros(0, 3), reduction="sum")

    seen = run(tmp_path, NET, loss, batches(rows(8, 6, 3), 8))
    assert len(seen.plans) <= 4
    assert math.isfinite(next(iter(last(seen, "label.entropy").values())))

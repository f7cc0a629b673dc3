"""A forward that raises because an index or a label is out of range: what is told of it, on sampled and on other steps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.left_behind import left_behind
from tests.torch.runs import Everything
from trainvet.callbacks.loop import watch
from trainvet.statistics import Snapshot


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens))


SAMPLED = [0, 3, 25]  # the first step, one of the dense start, one that is not sampled


def train(directory: Path, at: int, fault: str) -> tuple[Everything, Any]:
    torch.manual_seed(0)
    net, seen = Tokens(), Everything()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    vet = watch(net, optimizer, rules=[seen], select=[], every=20, steps=100, log_dir=directory)  # type: ignore[list-item]
    with contextlib.suppress(IndexError, ArithmeticError), vet:
        for index in range(40):
            tokens, labels = torch.randint(0, 10, (4, 6)), torch.randint(0, 10, (4, 6))
            if index == at and fault == "index":
                tokens[1, 2] = 12
            if index == at and fault == "label":
                labels[1, 2] = 10
            loss = F.cross_entropy(net(tokens).transpose(1, 2), labels)
            if index == at and fault == "other":
                raise ArithmeticError
            loss.backward()
            vet.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert left_behind(net, [optimizer]) == []
    assert vet.report.errors == ()
    assert vet.report.status == "failed"
    return seen, vet


def value(snapshot: Snapshot, key: str, name: str) -> float:
    return float(snapshot.values(key, (name,))[0])


@pytest.mark.parametrize("at", SAMPLED)
def test_an_index_that_an_embedding_has_no_row_for(tmp_path: Path, at: int) -> None:
    seen, _ = train(tmp_path, at, "index")
    last = seen.seen[-1]
    assert last.step == at
    assert value(last, "module.index_max", "words") == 12
    assert value(last, "module.index_min", "words") >= 0
    assert value(last, "input.max", "input") == 12
    assert "input" in seen.plans[-1].of("input")


@pytest.mark.parametrize("at", SAMPLED)
def test_a_label_that_the_loss_has_no_room_for(tmp_path: Path, at: int) -> None:
    seen, _ = train(tmp_path, at, "label")
    last = seen.seen[-1]
    assert last.step == at
    assert value(last, "label.out_of_range", "label") == 1
    assert value(last, "label.max", "label") == 10
    (loss,) = seen.plans[-1].losses
    assert (loss.name, loss.classes, loss.label) == ("loss", 10, "label")


@pytest.mark.parametrize("at", SAMPLED)
def test_another_error_is_not_explained_and_no_step(tmp_path: Path, at: int) -> None:
    seen, vet = train(tmp_path, at, "other")
    assert vet.report.steps == at
    assert not seen.seen or seen.seen[-1].step < at


def test_an_index_out_of_range_in_an_evaluation_is_not_the_trainings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, seen = Tokens(), Everything()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with contextlib.suppress(IndexError), watch(net, optimizer, rules=[seen], select=[], log_dir=tmp_path) as vet:  # type: ignore[list-item]
        for _ in range(3):
            loss = F.cross_entropy(net(torch.randint(0, 10, (24,))), torch.randint(0, 10, (24,)))
            loss.backward()
            vet.step(loss)
            optimizer.step()
        net.eval()
        with torch.no_grad():
            net(torch.tensor([99]))
    assert seen.seen[-1].step == 2
    assert value(seen.seen[-1], "module.index_max", "words") < 10

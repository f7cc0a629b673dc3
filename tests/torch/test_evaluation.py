"""The first batches of an evaluation: their inputs, modes and running statistics; that nothing is changed and nothing stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.left_behind import everything, left_behind
from trainvet.integrations.torch.evaluation import BATCHES, Evaluation
from trainvet.statistics import Table


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def evaluate(evaluation: Evaluation, root: nn.Module, batches: list[Any], step: Any = None) -> dict[str, Table]:
    with torch.no_grad():
        for batch in batches:
            evaluation.start(root)
            (step or root)(batch)
            evaluation.pause()
            assert left_behind(root) == []
    return evaluation.stop()


def row(table: Table, name: str) -> dict[str, float]:
    return {key: float(column[table.names.index(name)]) for key, column in table.columns.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_inputs_of_several_batches_are_numpys(dtype: torch.dtype) -> None:
    net = nn.Linear(4, 3).to(dtype)
    batches = [(torch.randn(size, 4) * 3 + 100 * index).to(dtype) for index, size in enumerate((16, 16, 5))]
    tables = evaluate(Evaluation(net), net, batches)
    truth = torch.cat(batches).double().numpy()
    assert tables["validation_input"].names == ("input",)
    assert row(tables["validation_input"], "input") == pytest.approx(
        {"mean": truth.mean(), "std": truth.std(), "min": truth.min(), "max": truth.max(), "count": 37}, rel=1e-5
    )


def test_labels_are_no_inputs_and_integers_are() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.words(ids).mean(1)), labels)

    net = Net().eval()
    batch = torch.randint(9, (6, 5)), torch.ones(6, 5, dtype=torch.bool), torch.randint(3, (6,))
    tables = evaluate(Evaluation(net), net, [batch], lambda batch: net(*batch))
    (name,) = tables["validation_input"].names
    assert row(tables["validation_input"], name)["max"] == batch[0].max()
    assert name == "input"


def test_only_the_first_batches_are_looked_at_in_each_evaluation() -> None:
    net = nn.Linear(4, 3)
    evaluation = Evaluation(net)
    for _ in range(2):
        tables = evaluate(evaluation, net, [torch.randn(2, 4) for _ in range(BATCHES + 3)])
        assert row(tables["validation_input"], "input")["count"] == 2 * BATCHES
    assert evaluation.stop() == {}


def test_modes_during_the_evaluation() -> None:
    net = model()
    evaluation = Evaluation(net)
    net.eval()
    net[3].train()
    table = evaluate(evaluation, net, [torch.randn(6, 4)])["validation_module"]
    assert dict(zip(table.names, table.columns["training"].tolist(), strict=True)) == {"0": 0, "1": 0, "3": 1, "4": 0}


@pytest.mark.parametrize(("updates", "momentum", "left"), [(0, 0.1, 1.0), (5, 0.1, 0.9**5), (3, 0.01, 0.99**3), (2, None, 0.0), (0, None, 1.0)])
def test_what_is_left_of_the_initial_statistics(updates: int, momentum: float | None, left: float) -> None:
    net = model()
    net[1].momentum = momentum  # type: ignore[assignment]
    evaluation = Evaluation(net)
    for _ in range(updates):
        net(torch.randn(8, 4))
    table = evaluate(evaluation, net.eval(), [torch.randn(6, 4)])["validation_module"]
    assert row(table, "1")["unsettled"] == pytest.approx(left)
    assert np.all(table.columns["unsettled"][[0, 2, 3]] == 0)


def test_statistics_that_are_not_the_initial_ones_are_settled() -> None:
    net = model().eval()
    with torch.no_grad():
        net[1].running_mean.add_(0.5)  # type: ignore[operator, union-attr]
    assert row(evaluate(Evaluation(net), net, [torch.randn(6, 4)])["validation_module"], "1")["unsettled"] == 0, "loaded without the counter"
    net = model().train()
    assert row(evaluate(Evaluation(net), net, [torch.randn(6, 4)])["validation_module"], "1")["unsettled"] == 0, "the batch's own are used"
    net = model()
    net[1] = nn.BatchNorm1d(8, track_running_stats=False)
    assert row(evaluate(Evaluation(net), net.eval(), [torch.randn(6, 4)])["validation_module"], "1")["unsettled"] == 0


def test_an_evaluation_is_not_changed() -> None:
    def scores(watched: bool) -> tuple[list[Tensor], Any]:
        net = model()
        evaluation = Evaluation(net)
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            if watched:
                evaluation.start(net)
            found.append(net(torch.randn(6, 4)))
            if watched:
                evaluation.pause()
        if watched:
            evaluation.stop()
        return found, everything(net)

    (mine, after), (bare, untouched) = scores(True), scores(False)
    assert all(torch.equal(one, other) for one, other in zip(mine, bare, strict=True))
    assert after == untouched


def test_inference_mode_and_what_broke_off() -> None:
    net = model().eval()
    evaluation = Evaluation(net)
    with torch.inference_mode():
        evaluation.start(net)
        net(torch.randn(6, 4))
        evaluation.pause()
        evaluation.start(net)  # this batch raises: nothing pauses it
    tables = evaluation.stop()
    assert row(tables["validation_input"], "input")["count"] == 6
    assert left_behind(net) == []

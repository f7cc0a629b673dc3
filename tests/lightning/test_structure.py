"""What Lightning's Trainer lets us see of a model: calls over accumulated batches, layers, and a gradient that somebody cut off."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.lightning.runs import Net, data, fit
from tests.torch.left_behind import left_behind
from tests.torch.runs import Everything
from trainvet.callbacks.lightning import Diagnostics
from trainvet.finding import Severity


class Cut(Net):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.net[:5](x).detach()
        return nn.functional.mse_loss(self.net[5:](h), y)


def run(module: pl.LightningModule, directory: Path, **arguments: Any) -> tuple[Everything, Diagnostics]:
    """Fit with everything measured, two rules judging, and a validation."""
    seen = Everything()
    vet = Diagnostics(log_dir=directory / "vet", select=("GR104", "GR108"), rules=[seen])
    fit(directory, module, [vet], val=data(seed=1), **arguments)
    assert vet.report.errors == ()
    assert left_behind(module) == []
    return seen, vet


def test_layers_and_calls_over_accumulated_batches(tmp_path: Path) -> None:
    seen, _ = run(Net(), tmp_path, accumulate_grad_batches=2, max_epochs=2)
    facts = seen.plans[-1]
    layers = {layer.name: layer for layer in facts.layers}
    assert [layers[f"net.{index}"].after for index in range(7)] == [(), *((f"net.{index}",) for index in range(6))]
    called, training = seen.sampled("module.called"), seen.sampled("module.training")
    assert called[1] == {"net.0": 2, "net.1": 2, "net.3": 2, "net.4": 2, "net.6": 2}
    assert all(set(row.values()) == {1} for row in training.values()), "validations in between do not count"
    assert (facts.disconnected, facts.severed, facts.shared_modules) == ((), (), ())


def test_a_cut_is_named_with_its_line(tmp_path: Path) -> None:
    seen, vet = run(Cut(), tmp_path, max_epochs=2)
    (cut,) = seen.plans[-1].severed
    line = inspect.getsourcelines(Cut.loss)[1] + 2
    assert (cut.operation, cut.source) == ("detach", f"tests/lightning/test_structure.py:{line}")
    assert set(cut.parameters) == {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}
    codes = {finding.code for head in vet.report.findings for finding in (head, *head.consequences)}
    assert {"GR104", "GR108"} <= codes
    assert max(finding.severity for finding in vet.report.findings) >= Severity.ERROR


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_autocast_of_the_trainer(tmp_path: Path, precision: Any) -> None:
    seen, _ = run(Net(), tmp_path, precision=precision, max_epochs=1)
    assert seen.plans[-1].autocast == ("bfloat16" if precision == "bf16-mixed" else "")


def test_loaded_weights(tmp_path: Path) -> None:
    trained = Net()
    assert not run(trained, tmp_path / "first", max_epochs=1)[0].plans[0].pretrained
    other = Net()
    other.load_state_dict(trained.state_dict())
    assert run(other, tmp_path / "second", max_epochs=1)[0].plans[0].pretrained
    assert bool(torch.isfinite(other.net[0].weight).all())

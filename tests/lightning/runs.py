"""Tiny Lightning trainings on the CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.torch.runs import Everything
from trainvet.callbacks.lightning import Diagnostics

BATCHES = 8


class Net(pl.LightningModule):
    """Dropout, normalisation and in-place ReLU; keeps its losses and the true norm of the gradients of every optimizer step.

    ``poison`` are the training batches, counted over the run, whose inputs are NaN.
    """

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, poison: Iterable[int] = (), **arguments: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        self.optimizer, self.arguments = optimizer, {"lr": 1e-2, **arguments}
        self.poison = frozenset(poison)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.batches = self.handed = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        self.handed += 1
        return (batch[0] * float("nan"), batch[1]) if self.handed - 1 in self.poison else batch

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        np.random.rand()
        random.random()
        self.batches += 1
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss((30 * batch[0], batch[1])))

    def scale(self) -> float:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        fused = any(group.get("fused") for group in self.trainer.optimizers[0].param_groups)
        return scaler.get_scale() if scaler is not None and fused else 1.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        self.norms.append(math.sqrt(sum(float((g.double() / self.scale()).square().sum()) for g in gradients if g is not None)))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.arguments)


def data(batches: int = BATCHES, size: int = 4, seed: int = 0, **arguments: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * size, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :1] + 0.1 * x[:, 1:2].square()), batch_size=size, **arguments)


def half(init_scale: float = 2.0**12, growth_interval: int = 2000) -> MixedPrecision:
    """float16 with a gradient scaler that works on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


def trainer(directory: Path, callbacks: Iterable[Any] = (), **arguments: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, "logger": False}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=directory, callbacks=list(callbacks), **({"max_epochs": 2} | quiet | arguments))


def fit(
    directory: Path, module: pl.LightningModule, callbacks: Iterable[Any] = (), *, loader: Any = None, val: Any = None, **arguments: Any
) -> pl.Trainer:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    run = trainer(directory, callbacks, **arguments)
    run.fit(module, data() if loader is None else loader, val)
    return run


def built(kind: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """A module with weights that are the same each time."""
    torch.manual_seed(0)
    return kind(*arguments, **more)


def watched(directory: Path, module: pl.LightningModule, *, every: int | str = "auto", **arguments: Any) -> tuple[Everything, Diagnostics]:
    """Fit with everything measured."""
    seen = Everything()
    diagnostics = Diagnostics(log_dir=directory / "vet", select=(), rules=[seen], every=every)
    fit(directory, module, [diagnostics], **arguments)
    assert diagnostics.report.errors == ()
    return seen, diagnostics


def finite(module: nn.Module) -> Iterator[bool]:
    """For every tensor of the state."""
    for value in module.state_dict().values():
        yield bool(torch.isfinite(value).all())

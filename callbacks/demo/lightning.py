"""The demo's Lightning programs. Each broken one differs from the healthy one in the lines that its class or its builder shows."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainvet.callbacks.demo.data import digits, with_a_hole
from trainvet.callbacks.demo.program import HEALTHY, Program, run
from trainvet.callbacks.lightning import Diagnostics
from trainvet.report import Report


class Classifier(L.LightningModule):
    """A net of three layers for the digits."""

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__()
        self.rate = rate
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, 10]."""
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Logs loss and accuracy."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.rate)


class ForgottenBackbone(Classifier):
    """The optimizer is given the head alone."""

    def configure_optimizers(self) -> Any:
        """Should be ``self.parameters()``."""
        return torch.optim.Adam(self.head.parameters(), lr=self.rate)


class StalledSchedule(Classifier):
    """A schedule made for steps, which Lightning advances once per epoch unless told otherwise."""

    def configure_optimizers(self) -> Any:
        """Should return ``{"scheduler": schedule, "interval": "step"}``."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(self.trainer.estimated_stepping_batches))
        return [optimizer], [schedule]


class DeadLayer(Classifier):
    """A bias of -6 in front of a ReLU: no unit is ever above 0, and none gets a gradient."""

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__(rate)
        layer = self.backbone[2]
        assert isinstance(layer, nn.Linear)
        nn.init.constant_(layer.bias, -6.0)


def train(kind: type[Classifier], log_dir: Path, *, rate: float = 1e-3, hole: bool = False) -> Report:
    """Train for ten epochs (220 steps) and return what trainvet says."""
    L.seed_everything(0, verbose=False)
    (images, labels), validation = digits()
    images = with_a_hole(images) if hole else images
    training = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    diagnostics = Diagnostics(log_dir=log_dir)
    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[diagnostics],
    )
    trainer.fit(
        kind(rate),
        DataLoader(training, batch_size=64, shuffle=True),
        DataLoader(TensorDataset(*map(torch.from_numpy, validation)), batch_size=64),
    )
    return diagnostics.report


PROGRAMS = (
    Program("healthy", "a healthy net", HEALTHY, lambda log_dir: train(Classifier, log_dir)),
    Program("high-rate", "learning rate 1.0 instead of 0.001", "WT104", lambda log_dir: train(Classifier, log_dir, rate=1.0)),
    Program("forgotten-backbone", "the backbone is not in the optimizer", "WT102", lambda log_dir: train(ForgottenBackbone, log_dir)),
    Program("missing-row", "one image of 1,408 is NaN", "IN101", lambda log_dir: train(Classifier, log_dir, hole=True)),
    Program("stalled-schedule", "a schedule made for steps advances per epoch", "LR102", lambda log_dir: train(StalledSchedule, log_dir)),
    Program("dead-layer", "a layer of ReLU units starts with bias -6", "AC101", lambda log_dir: train(DeadLayer, log_dir)),
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.exit(run("lightning", PROGRAMS, sys.argv[1:]))

"""Trains a PyTorch setup as a user would, in Lightning or in a hand-written loop, with trainvet at its defaults."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.detection.setup import Array, Setup
from trainvet.report import Report

OPTIMIZERS = {
    "sgd": lambda setup: (torch.optim.SGD, {"momentum": setup.momentum, "weight_decay": setup.decay}),
    "nesterov": lambda setup: (torch.optim.SGD, {"momentum": setup.momentum, "weight_decay": setup.decay, "nesterov": True}),
    "adam": lambda setup: (torch.optim.Adam, {"weight_decay": setup.decay}),
    "adamw": lambda setup: (torch.optim.AdamW, {"weight_decay": setup.decay or 0.01}),
    "rmsprop": lambda setup: (torch.optim.RMSprop, {"weight_decay": setup.decay}),
    "adagrad": lambda setup: (torch.optim.Adagrad, {"weight_decay": setup.decay}),
}
Batch = list[Tensor]


def seed_all(seed: int) -> None:
    """Before a recipe builds its model."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def optimizer(setup: Setup, model: nn.Module, prefix: str = "") -> torch.optim.Optimizer:
    """Over all parameters of ``prefix`` that train and that the setup hands over."""
    named = [(name, value) for name, value in model.named_parameters() if name.startswith(prefix)]
    kind, arguments = OPTIMIZERS[setup.optimizer](setup)
    if setup.epsilon:
        arguments["eps"] = setup.epsilon
    return kind([value for name, value in named if setup.trains(name) and value.requires_grad], lr=setup.rate, **arguments)


def outputs(setup: Setup, model: nn.Module, x: Batch) -> Any:
    """What the model says of a batch."""
    half = next(model.parameters()).dtype if setup.precision.endswith("-true") else None
    x = [value.to(half) if half is not None and value.is_floating_point() else value for value in x]
    result = model(*x) if setup.forward is None else setup.forward(model, *x)
    return result.float() if half is not None else result


def loss_of(setup: Setup, model: nn.Module, batch: Batch) -> Tensor:
    """The loss that is minimised."""
    with torch.autocast("cpu", dtype=torch.float16) if setup.precision == "fp16-unscaled" else contextlib.nullcontext():
        if setup.loss is not None:
            return setup.loss(model, *batch)
        return setup.criterion(outputs(setup, model, batch[:-1]), batch[-1])


def loaders(setup: Setup) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation batches."""
    tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in (*setup.x, setup.y)]
    held = [torch.from_numpy(np.ascontiguousarray(value)) for value in (*setup.val_x, setup.val_y)]
    return DataLoader(TensorDataset(*tensors), setup.batch, shuffle=setup.shuffle), DataLoader(TensorDataset(*held), 128)


class Module(L.LightningModule):
    """The setup as a LightningModule."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model, self.setup_ = setup.model, setup
        self.automatic_optimization = not setup.players

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        setup = self.setup_
        if not setup.players:
            return loss_of(setup, self.model, batch)
        for player, (_, play) in zip(self.optimizers(), setup.players, strict=True):
            loss = play(self.model, *batch)
            player.zero_grad()
            self.manual_backward(loss)
            player.step()
        return None

    def validation_step(self, batch: Batch, index: int) -> None:
        if not self.setup_.players:
            self.log("val_loss", loss_of(self.setup_, self.model, batch))

    def on_train_epoch_start(self) -> None:
        if self.setup_.mode == "eval":
            self.model.eval()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        jump(self.setup_, self.global_step, self.optimizers(use_pl_optimizer=False))

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        if self.setup_.clears:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        setup = self.setup_
        if setup.players:
            return [optimizer(setup, self.model, prefix) for prefix, _ in setup.players], []
        made = optimizer(setup, self.model)
        if setup.schedule is None:
            return made
        return {"optimizer": made, "lr_scheduler": {"scheduler": setup.schedule(made, setup), "interval": setup.interval}}


def jump(setup: Setup, step: int, made: Any) -> None:
    """A rate that is multiplied at some step, as by a callback gone wrong."""
    if setup.jump is not None and step == setup.jump[0]:
        for group in made.param_groups:
            group["lr"] = setup.rate * setup.jump[1]


def in_lightning(setup: Setup, log_dir: Path | None, extra: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yields the diagnostics (None where ``log_dir`` is None), and trains when asked for more."""
    from trainvet.callbacks.lightning import Diagnostics

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    diagnostics = None if log_dir is None else Diagnostics(log_dir=log_dir)
    yield diagnostics
    known = {"bf16-mixed": "bf16-mixed", "16-mixed": "16-mixed", "bf16-true": "bf16-true"}
    trainer = L.Trainer(
        max_epochs=setup.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        precision=known.get(setup.precision, "32-true"),
        gradient_clip_val=setup.clip or None,
        accumulate_grad_batches=setup.accumulate,
        callbacks=[*([diagnostics] if diagnostics else []), *extra],
    )
    trainer.fit(Module(setup), *loaders(setup))


def in_loop(setup: Setup, log_dir: Path | None, watcher: Any = None) -> Iterator[Any]:
    """The same with a hand-written loop and :func:`trainvet.callbacks.loop.watch`, or with another ``watcher(model, optimizers)`` in its place."""
    from trainvet.callbacks.loop import watch

    model = setup.model.bfloat16() if setup.precision == "bf16-true" else setup.model
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(setup.precision)
    scaler = torch.amp.GradScaler("cpu") if setup.precision == "16-mixed" else None
    made = [optimizer(setup, model, prefix) for prefix, _ in setup.players or [("", None)]]
    schedule = setup.schedule(made[0], setup) if setup.schedule is not None else None
    per_epoch = -(-setup.batches // setup.accumulate)
    vet: Any = contextlib.nullcontext()
    if log_dir is not None:
        arguments = {"scheduler": schedule, "steps_per_epoch": per_epoch, "scheduler_interval": setup.interval} if schedule is not None else {}
        vet = watch(model, made, scaler=scaler, steps=setup.steps, log_dir=log_dir, **arguments)
    elif watcher is not None:
        vet = watcher(model, made)
    yield vet if log_dir is not None else None
    training, validation = loaders(setup)
    cast = torch.autocast("cpu", dtype=mixed) if mixed is not None else contextlib.nullcontext()
    told = (lambda loss, made: None) if log_dir is None and watcher is None else (lambda loss, made: vet.step(loss, made))
    step = 0
    with vet:
        model.train()
        for _ in range(setup.epochs):
            for index, batch in enumerate(training):
                jump(setup, step, made[0])
                if setup.players:
                    for player, (_, play) in zip(made, setup.players, strict=True):
                        player.zero_grad()
                        loss = play(model, *batch)
                        loss.backward()
                        told(loss, player)
                        player.step()
                    continue
                with cast:
                    loss = loss_of(setup, model, batch)
                part = loss / setup.accumulate
                (scaler.scale(part) if scaler is not None else part).backward()
                if (index + 1) % setup.accumulate and index + 1 < len(training):
                    continue
                if scaler is not None:
                    scaler.unscale_(made[0])
                told(loss, made[0])
                if setup.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
                if scaler is not None:
                    scaler.step(made[0])
                    scaler.update()
                else:
                    made[0].step()
                if setup.clears:
                    made[0].zero_grad()
                if schedule is not None and setup.interval == "step":
                    schedule.step()
                step += 1
            if schedule is not None and setup.interval == "epoch":
                schedule.step()
            model.eval()
            if not setup.players:
                with torch.no_grad():
                    [float(loss_of(setup, model, batch)) for batch in validation]
            if setup.mode == "train":
                model.train()


def predict(setup: Setup, x: tuple[Array, ...]) -> Array:
    """The model's outputs on unseen data, in evaluation mode."""
    setup.model.eval()
    with torch.no_grad():
        parts = torch.split(torch.arange(len(x[0])), 256)
        result = [outputs(setup, setup.model, [torch.from_numpy(np.ascontiguousarray(value))[part] for value in x]) for part in parts]
    return np.asarray(torch.cat(result).float().numpy())


def train(setup: Setup, framework: str, log_dir: Path | None) -> tuple[Report | None, str]:
    """Train to the end, or to the exception whose text is returned."""
    course = (in_lightning if framework == "lightning" else in_loop)(setup, log_dir)
    diagnostics = next(course)
    crash = ""
    try:
        for _ in course:
            pass
    except Exception as error:
        crash = f"{type(error).__name__}: {error}"[:300]
    return (None if diagnostics is None else diagnostics.report), crash

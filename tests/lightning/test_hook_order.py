"""The order in which a real fit does things, as far as our numbers depend on it. When Lightning changes it, this fails first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning.runs import Net, built, data, fit, half


class Recorder(pl.Callback):
    """Writes down what happens, and whether gradients carry the loss scale and whether they are clipped at that moment."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.scales: dict[str, float] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        self.events.append("batch start")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.events.append("before zero_grad")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.scales["loss"] = float(loss.detach()) / module.losses[-1]
        self.events.append("before backward")

    def on_after_backward(self, *args: Any) -> None:
        self.events.append("after backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.events.append("before optimizer step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.events.append("batch end")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.events.append("train start")
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *args: self.events.append("step begins"))
            optimizer.register_step_post_hook(lambda *args: self.events.append("step is done"))

    def on_train_end(self, *args: Any) -> None:
        self.events.append("train end")

    def on_save_checkpoint(self, *args: Any) -> None:
        self.events.append("save checkpoint")


class Module(Net):
    recorder: Recorder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.recorder.events.append("training_step")
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.recorder.events.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


PLAIN = ["batch start", "step begins", "training_step", "before zero_grad", "before backward", "after backward"]
PLAIN += ["before optimizer step", "clip", "step is done", "batch end"]
SCALED = ["batch start", "training_step", "before zero_grad", "before backward", "after backward"]
SCALED += ["before optimizer step", "clip", "step begins", "step is done", "batch end"]
SKIPPED = [event for event in SCALED if not event.startswith("step ")]
PARTIAL = ["batch start", "training_step", "before zero_grad", "before backward", "after backward", "batch end"]
JOINED = [event for event in PLAIN if event != "before zero_grad"]


def events(directory: Path, batches: int, poison: tuple[int, ...] = (), fused: bool = False, **arguments: Any) -> Recorder:
    module = built(Module, poison=poison, fused=fused)
    module.recorder = recorder = Recorder()
    fit(directory, module, [recorder], loader=data(batches), max_epochs=1, **arguments)
    assert recorder.events[0] == "train start"
    assert recorder.events[-1] == "train end"
    recorder.events = recorder.events[1:-1]
    return recorder


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_without_a_scaler_the_forward_lies_inside_the_optimizer_step(tmp_path: Path, precision: str) -> None:
    assert events(tmp_path, 2, precision=precision).events == PLAIN * 2


def test_with_a_scaler_the_step_follows_the_backward_and_is_left_out_on_an_overflow(tmp_path: Path) -> None:
    recorder = events(tmp_path, 3, poison=(1,), plugins=[half(2.0**10)])
    assert recorder.events == SCALED + SKIPPED + SCALED
    assert recorder.scales["loss"] == pytest.approx(2.0**9), "the loss handed over is scaled already"


def test_a_fused_step_under_a_scaler_runs_also_on_an_overflow(tmp_path: Path) -> None:
    recorder = events(tmp_path, 3, poison=(1,), fused=True, plugins=[half(2.0**10)])
    assert recorder.events == SCALED * 3


def test_accumulation_steps_on_the_last_batch_of_a_group(tmp_path: Path) -> None:
    recorder = events(tmp_path, 3, accumulate_grad_batches=2)
    assert recorder.events == PARTIAL + JOINED + PLAIN
    assert recorder.scales["loss"] == pytest.approx(0.5), "the loss handed over is divided by the batches of a full group, also in a short one"


def test_gradients_are_unscaled_and_not_yet_clipped_before_the_optimizer_step(tmp_path: Path) -> None:
    class Sees(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            after.extend([float(torch.nn.utils.get_total_norm(gradients))] if gradients else [])

    for plugins in ([], [half(2.0**10)]):
        seen: list[float] = []
        after: list[float] = []
        module = built(Sees)
        module.recorder = Recorder()
        fit(tmp_path, module, loader=data(3), max_epochs=1, plugins=plugins, gradient_clip_val=0.01)
        assert all(0.1 < norm < 50 for norm in seen)
        assert after == pytest.approx([0.01, 0.01], rel=1e-3)


def test_checkpoints_are_written_after_our_last_look_at_a_batch(tmp_path: Path) -> None:
    module = built(Module)
    module.recorder = recorder = Recorder()
    fit(tmp_path, module, [ModelCheckpoint(tmp_path, every_n_train_steps=1), recorder], loader=data(1), max_epochs=1, enable_checkpointing=True)
    assert recorder.events.index("save checkpoint") > recorder.events.index("batch end")

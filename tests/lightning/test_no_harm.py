"""With and without trainvet: the same weights, buffers, optimizer states and random numbers, bit for bit, and nothing left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lightning.runs import Net, built, data, fit, half, trainer
from tests.lightning.test_units import Critic, Pair
from tests.torch.left_behind import attributes, everything, left_behind, plain
from trainvet.action import TrainingAborted
from trainvet.callbacks.lightning import Diagnostics
from trainvet.watchpoint import Watchpoint


class True16(Net):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0].to(self.dtype)), batch[1].to(self.dtype))


class Recomputed(Net):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net[4:](checkpoint(self.net[:4], batch[0], use_reentrant=False)), batch[1])


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16), "interval": "step"}]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:4], self.net[4:]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.02)


MODES: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "32": (Net, {}, {}),
    "16-mixed": (Net, {}, {"half": True}),
    "16-mixed with overflows": (Net, {"poison": [2, 3, 9]}, {"half": True}),
    "16-mixed, fused": (Net, {"fused": True}, {"half": True}),
    "bf16-mixed": (Net, {}, {"precision": "bf16-mixed"}),
    "bf16-true": (True16, {}, {"precision": "bf16-true"}),
    "accumulation": (Net, {}, {"accumulate_grad_batches": 3}),
    "accumulation, 16-mixed, clipped": (Net, {}, {"accumulate_grad_batches": 3, "half": True, "gradient_clip_val": 0.1}),
    "clipped by value": (Net, {}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "fused": (Net, {"fused": True}, {}),
    "momentum, weight decay": (Net, {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 1e-3}, {}),
    "two optimizers": (Pair, {}, {}),
    "two optimizers, several steps": (Critic, {}, {}),
    "L-BFGS": (Net, {"optimizer": torch.optim.LBFGS, "lr": 0.1, "max_iter": 3}, {}),
    "validation": (Net, {}, {"val": data(3, seed=5), "num_sanity_val_steps": 2, "val_check_interval": 4}),
    "recomputed activations": (Recomputed, {}, {}),
    "schedule": (Scheduled, {}, {}),
    "NaN, and nobody asked to stop": (Net, {"poison": [5]}, {}),
    "unfreezing": (Frozen, {}, {"more": lambda: BackboneFinetuning(1, backbone_initial_lr=0.01, should_align=False)}),
    "averaging": (Net, {}, {"more": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)}),
}


def trained(directory: Path, mode: str, callbacks: list[Any]) -> tuple[Net, pl.Trainer]:
    kind, arguments, settings = MODES[mode]
    settings = dict(settings)
    more = settings.pop("more", None)
    if settings.pop("half", False):
        settings["plugins"] = [half()]
    module = built(kind, **arguments)
    run = fit(directory, module, [*callbacks, *([more()] if more else [])], **settings)
    return module, run


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_bit_for_bit(tmp_path: Path, mode: str) -> None:
    bare, run = trained(tmp_path / "bare", mode, [])
    expected, hooks, names = everything(bare, run.optimizers), left_behind(bare, run.optimizers), attributes(bare)
    for every in (1, "auto"):
        diagnostics = Diagnostics(log_dir=tmp_path / str(every), every=every, rules=[Watchpoint("activation.abs_max", above=1e30)])
        module, run = trained(tmp_path / "vetted", mode, [diagnostics])
        assert everything(module, run.optimizers) == expected, every
        assert left_behind(module, run.optimizers) == hooks
        assert attributes(module) == names
        assert str(module.losses) == str(bare.losses)
        assert diagnostics.report.errors == ()
        assert diagnostics.report.steps == run.global_step


def test_training_is_the_same_when_every_rule_and_statistic_is_at_work(tmp_path: Path) -> None:
    expected = everything(*(lambda pair: (pair[0], pair[1].optimizers))(trained(tmp_path / "bare", "32", [])))
    diagnostics = Diagnostics(log_dir=tmp_path, every=1, select=("all",), abort_on="fatal", strict=True)
    module, run = trained(tmp_path / "vetted", "32", [diagnostics])
    assert everything(module, run.optimizers) == expected, "a guard that has nothing to hold changes nothing"


# ---- what breaks off leaves nothing behind either


class Boom(pl.Callback):
    def __init__(self, error: type[BaseException], hook: str) -> None:
        self.error, self.hook = error, hook

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("hook"):
            return self.fail
        return object.__getattribute__(self, name)

    def fail(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 3:
            raise self.error("boom")


class BoomInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.batches == 4:
            raise ArithmeticError("boom")
        return loss


class BoomInForward(Net):
    def __init__(self) -> None:
        super().__init__()

        class Breaks(nn.Module):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                if self.calls == 4:
                    raise ArithmeticError("boom")
                return x

        self.net.insert(3, Breaks())


HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")


@pytest.mark.parametrize("order", ["before us", "after us"])
@pytest.mark.parametrize("hook", HOOKS)
def test_nothing_stays_after_an_error_in_another_callback(tmp_path: Path, hook: str, order: str) -> None:
    module, diagnostics, boom = built(Net), Diagnostics(log_dir=tmp_path, every=1), Boom(ArithmeticError, hook)
    run = trainer(tmp_path, [boom, diagnostics] if order == "before us" else [diagnostics, boom])
    with pytest.raises(ArithmeticError, match="boom"):
        run.fit(module, data())
    assert left_behind(module, run.optimizers) == []
    assert (diagnostics.report.status, diagnostics.report.reason) == ("failed", "ArithmeticError: boom")
    assert diagnostics.report.errors == ()


@pytest.mark.parametrize("kind", [BoomInStep, BoomInForward])
def test_nothing_stays_after_an_error_in_the_module(tmp_path: Path, kind: type[Net]) -> None:
    module, diagnostics = built(kind), Diagnostics(log_dir=tmp_path, every=1)
    run = trainer(tmp_path, [diagnostics])
    with pytest.raises(ArithmeticError, match="boom"):
        run.fit(module, data())
    assert left_behind(module, run.optimizers) == []
    assert diagnostics.report.status == "failed"
    assert diagnostics.report.steps == 3


def test_nothing_stays_after_an_interrupt(tmp_path: Path) -> None:
    module, diagnostics = built(Net), Diagnostics(log_dir=tmp_path, every=1)
    run = trainer(tmp_path, [diagnostics, Boom(KeyboardInterrupt, "on_before_backward")])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(module, data())
    assert left_behind(module, run.optimizers) == []
    assert diagnostics.report.status == "failed"


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_stays_after_an_abort(tmp_path: Path, fused: bool) -> None:
    module, diagnostics = built(Net, poison=[5], fused=fused), Diagnostics(log_dir=tmp_path, every=1, abort_on="error")
    run = trainer(tmp_path, [diagnostics])
    with pytest.raises(TrainingAborted):
        run.fit(module, data())
    assert left_behind(module, run.optimizers) == []
    assert diagnostics.report.status == "aborted"


# ---- checkpoints


def test_entries_of_model_and_optimizer_in_a_checkpoint_hold_nothing_of_ours(tmp_path: Path) -> None:
    saved = {}
    for name, callbacks in (("bare", []), ("vetted", [Diagnostics(log_dir=tmp_path, every=1)])):
        keeper = ModelCheckpoint(tmp_path / name, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        fit(tmp_path, built(Net), [*callbacks, keeper], enable_checkpointing=True)
        saved[name] = {path.name: torch.load(path, weights_only=True) for path in sorted((tmp_path / name).glob("*.ckpt"))}
    assert sorted(saved["bare"]) == sorted(saved["vetted"]) == ["step=10.ckpt", "step=15.ckpt", "step=5.ckpt"]
    for name, bare in saved["bare"].items():
        vetted = saved["vetted"][name]
        ours = [key for key in vetted["callbacks"] if key.startswith("trainvet")]
        assert ours == [key for key in vetted["callbacks"] if key not in bare["callbacks"]] != []
        for part in set(bare) - {"callbacks"}:
            assert plain(vetted[part]) == plain(bare[part]), part


@pytest.mark.parametrize("stop", [5, 8, 13])
def test_a_resumed_run_goes_on_counting(tmp_path: Path, stop: int) -> None:
    """At any step, sampled or not, with new objects."""
    first = Diagnostics(log_dir=tmp_path / "first", every=4)
    fresh = copy.deepcopy(first)
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=stop, save_top_k=1, filename="{step}")
    fit(tmp_path, built(Net), [first, keeper], max_steps=stop, max_epochs=3, enable_checkpointing=True)
    state = torch.load(keeper.best_model_path, weights_only=True)["callbacks"]
    (ours,) = [value for key, value in state.items() if key.startswith("trainvet")]
    assert (ours["step"], ours["applied"]) == (stop, stop)

    module = built(Net)
    run = trainer(tmp_path, [fresh], max_epochs=3)
    torch.manual_seed(1)
    run.fit(module, data(), ckpt_path=keeper.best_model_path)
    assert fresh.report.errors == ()
    assert fresh.history("run.gradient_norm").steps.tolist() == list(range(stop, 24))
    assert (fresh.report.steps, fresh.report.applied) == (24, 24)


def test_rules_remember_over_a_resume(tmp_path: Path) -> None:
    """Three in a row, two before and one after the break."""

    def diagnostics(name: str) -> Diagnostics:
        return Diagnostics(log_dir=tmp_path / name, select=(), rules=[Watchpoint("run.gradient_norm", above=0.0, patience=7)])

    first, second = diagnostics("first"), diagnostics("second")
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=1, filename="{step}")
    fit(tmp_path, built(Net), [first, keeper], max_steps=5, enable_checkpointing=True)
    assert first.report.findings == ()
    trainer(tmp_path, [second]).fit(built(Net), data(), ckpt_path=keeper.best_model_path)
    assert [(finding.first_step, finding.step) for finding in second.report.findings] == [(0, 6)]

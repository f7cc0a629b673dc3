"""Every number is the user's: losses as he wrote them, gradients unscaled, accumulated and not yet clipped, one row per optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.lightning.runs import BATCHES, Net, built, data, fit, half, watched
from tests.torch.runs import Everything
from trainvet.callbacks.lightning import Diagnostics

CLIPPED = {"gradient_clip_val": 0.01}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "32": ({}, {}),
    "16-mixed": ({}, {"half": True}),
    "16-mixed, fused": ({"fused": True}, {"half": True}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "64-true": ({}, {"precision": "64-true"}),
    "clipped by norm": ({}, CLIPPED),
    "clipped by value": ({}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "16-mixed, clipped": ({}, {"half": True, **CLIPPED}),
    "SGD, foreach": ({"optimizer": torch.optim.SGD, "foreach": True}, {}),
}


def run(directory: Path, mode: str, module: type[Net] = Net, **more: Any) -> tuple[Net, Everything, Diagnostics]:
    arguments, trainer = MODES[mode]
    trainer = {**trainer, **more}
    if trainer.pop("half", False):
        trainer["plugins"] = [half()]
    net = built(module, **arguments)
    if trainer.get("precision") in ("64-true", "bf16-true"):
        net.loss = lambda batch: nn.functional.mse_loss(net.net(batch[0].to(net.dtype)), batch[1].to(net.dtype))  # type: ignore[method-assign]
    seen, diagnostics = watched(directory, net, **trainer)
    return net, seen, diagnostics


def recorded(diagnostics: Diagnostics, key: str) -> np.ndarray[Any, Any]:
    return diagnostics.history(key).values[:, 0]


@pytest.mark.parametrize("every", [1, 5], ids=["all sampled", "every fifth"])
@pytest.mark.parametrize("mode", MODES)
def test_norms_and_losses_are_the_users(tmp_path: Path, mode: str, every: int) -> None:
    net, seen, diagnostics = run(tmp_path, mode, every=every)
    assert len(net.norms) == 2 * BATCHES
    tolerance = 1e-3 if "bf16-true" in mode else 1e-5
    np.testing.assert_allclose(recorded(diagnostics, "run.gradient_norm"), net.norms, rtol=tolerance)
    np.testing.assert_allclose(recorded(diagnostics, "loss.value"), net.losses, rtol=tolerance)
    assert diagnostics.history("run.gradient_norm").steps.tolist() == list(range(2 * BATCHES))
    for step, norms in seen.sampled("gradient.norm").items():
        assert np.sqrt(np.square(list(norms.values())).sum()) == pytest.approx(net.norms[step], rel=tolerance)
    assert len(seen.sampled("gradient.norm")) == (16 if every == 1 else 11)


def test_sampled_gradient_statistics_are_unscaled_under_a_fused_optimizer(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", "32")[1]
    scaled = run(tmp_path / "b", "16-mixed, fused")[1]
    for key in ("gradient.abs_max", "gradient.rms", "gradient.std", "gradient.min"):
        for name, value in plain.sampled(key)[0].items():
            assert scaled.sampled(key)[0][name] == pytest.approx(value, rel=0.05, abs=1e-3), (key, name)


@pytest.mark.parametrize("batches", [8, 7], ids=["full groups", "a short last group"])
@pytest.mark.parametrize("mode", ["32", "16-mixed", "16-mixed, fused", "clipped by norm"])
def test_accumulation(tmp_path: Path, mode: str, batches: int) -> None:
    net, _, diagnostics = run(tmp_path, mode, accumulate_grad_batches=4, loader=data(batches))
    assert len(net.norms) == 4
    np.testing.assert_allclose(recorded(diagnostics, "run.gradient_norm"), net.norms, rtol=1e-5)
    groups = [group for epoch in (0, 1) for group in np.split(np.array(net.losses)[epoch * batches : (epoch + 1) * batches], [4])]
    np.testing.assert_allclose(recorded(diagnostics, "loss.value"), [group.mean() for group in groups], rtol=1e-5)
    assert diagnostics.history("loss.value").steps.tolist() == [0, 1, 2, 3]


def test_the_loss_is_known_under_accumulation_and_half_precision(tmp_path: Path) -> None:
    for mode in ("32", "16-mixed"):
        for count in (1, 4):
            seen = run(tmp_path / f"{mode}{count}", mode, accumulate_grad_batches=count)[1]
            (loss,) = seen.plans[-1].losses
            assert (loss.kind, loss.samples, loss.reduction) == ("regression", 4, "mean"), (mode, count)


def test_a_step_that_the_scaler_skips_is_counted_but_not_applied(tmp_path: Path) -> None:
    net = built(Net, poison=[5])
    seen, diagnostics = watched(tmp_path, net, plugins=[half(growth_interval=3)], every=4)
    skipped, scale = seen.series("run.skipped"), seen.series("run.loss_scale")
    assert [step for step, value in skipped.items() if value] == [5]
    assert sorted(skipped) == list(range(16))
    assert scale[4] == 2.0**13
    assert scale[6] == 2.0**12
    assert (diagnostics.report.steps, diagnostics.report.applied) == (16, 15)
    assert not np.isfinite(recorded(diagnostics, "run.gradient_norm")[5])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_has_no_update(tmp_path: Path, fused: bool) -> None:
    seen, diagnostics = watched(tmp_path, built(Net, poison=[5], fused=fused), plugins=[half()], every=1)
    assert sorted(seen.sampled("update.ratio")) == [step for step in range(16) if step != 5]
    assert [step for step, value in seen.series("run.skipped").items() if value] == [5]
    assert diagnostics.report.applied == 15


# ---- several optimizers, several evaluations


class Pair(Net):
    """Two networks, each with its own optimizer, under manual optimisation; the second one steps ``critic`` times per batch."""

    critic = 1

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)
        self.pairs: list[tuple[int, float, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        for index, optimizer in enumerate([first, *[second] * self.critic]):
            network = self.net if index == 0 else self.other
            loss = nn.functional.mse_loss(network(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.net.parameters(), **self.arguments), torch.optim.SGD(self.other.parameters(), lr=0.01)


class Critic(Pair):
    critic = 3


@pytest.mark.parametrize("kind", [Pair, Critic])
@pytest.mark.parametrize("every", [1, 6])
def test_manual_optimisation_with_two_optimizers(tmp_path: Path, kind: type[Pair], every: int) -> None:
    net = built(kind)
    seen, diagnostics = watched(tmp_path, net, every=every)
    steps = 2 * BATCHES * (1 + kind.critic)
    assert diagnostics.report.steps == len(net.norms) == steps
    assert [seen.series("run.gradient_norm")[step] for step in range(steps)] == pytest.approx(net.norms, rel=1e-5)
    first = [step for step in range(steps) if step % (1 + kind.critic) == 0]
    assert sorted(seen.series("loss.value", "loss of optimizer 0")) == first
    assert sorted(seen.series("loss.value", "loss of optimizer 1")) == [step for step in range(steps) if step not in first]
    assert [seen.series("loss.value")[step] for step in range(steps)] == pytest.approx(net.losses, rel=1e-5)
    for step, norms in seen.sampled("gradient.norm").items():
        assert all(name.startswith("net." if step in first else "other.") for name in norms)
    late = {name.split(".")[0] for step, norms in seen.sampled("gradient.norm").items() if step >= 12 for name in norms}
    assert late == {"net", "other"}, "both are sampled, also after the dense start"


def test_two_optimizers_with_a_scaler(tmp_path: Path) -> None:
    net = built(Pair)
    seen, diagnostics = watched(tmp_path, net, plugins=[half()], every=1)
    assert [seen.series("run.gradient_norm")[step] for step in range(32)] == pytest.approx(net.norms, rel=1e-5)
    assert [seen.series("loss.value")[step] for step in range(32)] == pytest.approx(net.losses, rel=1e-5)
    assert diagnostics.report.applied == 32


def test_the_first_of_several_evaluations_counts(tmp_path: Path) -> None:
    class Newton(Net):
        def loss(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.net[4](self.net[0](batch[0])).mean(1, keepdim=True), batch[1])

    net = built(Newton, optimizer=torch.optim.LBFGS, lr=0.1, max_iter=3)
    seen, diagnostics = watched(tmp_path, net, every=1)
    first = [index for index in range(len(net.norms)) if index % 3 == 0]
    assert len(net.norms) == 3 * 16
    assert list(seen.series("run.gradient_norm").values()) == pytest.approx([net.norms[index] for index in first], rel=1e-5)
    assert list(seen.series("loss.value").values()) == pytest.approx([net.losses[index] for index in first], rel=1e-5)
    assert diagnostics.report.steps == 16


# ---- what does not belong to training


def test_validation_and_sanity_check_leave_no_numbers(tmp_path: Path) -> None:
    with_validation = built(Net)
    seen, _ = watched(tmp_path / "a", with_validation, val=data(3, seed=5), num_sanity_val_steps=2, val_check_interval=4, every=1)
    alone, _ = watched(tmp_path / "b", built(Net), every=1)
    assert [seen.series("loss.value")[step] for step in range(4)] == [alone.series("loss.value")[step] for step in range(4)]
    for key in ("activation.abs_max", "activation.batches", "input.max"):
        assert seen.sampled(key)[0] == alone.sampled(key)[0], key
    assert max(seen.sampled("input.max")[step]["input"] for step in seen.sampled("input.max")) < 10, "validation data are 30 times larger"
    assert min(seen.series("loss.value")) == 0


def test_a_batch_without_a_loss_takes_no_step(tmp_path: Path) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)

    net = built(Skips)
    seen, diagnostics = watched(tmp_path, net, every=1)
    np.testing.assert_allclose(recorded(diagnostics, "loss.value"), net.losses, rtol=1e-5)
    assert len(net.losses) == 12
    assert not diagnostics.report.findings
    assert [snapshot.batch for snapshot in seen.seen if snapshot.tables] == [1, 2, 4, 5, 6, 7] * 2
    assert diagnostics.report.applied == 12


def test_learning_rates_are_those_in_force(tmp_path: Path) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            halves = [{"params": self.net[:4].parameters(), "lr": 0.1, "name": "body"}, {"params": self.net[4:].parameters(), "lr": 0.01}]
            optimizer = torch.optim.SGD(halves, lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    seen, _ = watched(tmp_path, built(Scheduled))
    assert seen.series("optimizer.learning_rate", "body") == pytest.approx({step: 0.1 * 0.5**step for step in range(16)})
    assert seen.series("optimizer.learning_rate", "SGD/1") == pytest.approx({step: 0.01 * 0.5**step for step in range(16)})


def test_a_learning_rate_in_a_tensor(tmp_path: Path) -> None:
    seen, _ = watched(tmp_path, built(Net, lr=torch.tensor(0.02), foreach=False))
    assert seen.series("optimizer.learning_rate") == pytest.approx(dict.fromkeys(range(16), 0.02))


def test_the_update_is_measured_over_the_optimizer_step(tmp_path: Path) -> None:
    class Moves(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            self.before = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if hasattr(self, "before"):
                self.moved = {name: float((p.detach() - self.before[name]).norm() / self.before[name].norm()) for name, p in self.named_parameters()}
                self.moves.append(self.moved)

    net = built(Moves)
    net.moves = []
    seen, _ = watched(tmp_path, net, every=1)
    assert len(net.moves) == 15
    for step, moved in enumerate(net.moves):
        for name, ratio in seen.sampled("update.ratio")[step].items():
            assert ratio == pytest.approx(moved[name], rel=1e-4), (step, name)


def test_steps_are_the_same_without_trainvet(tmp_path: Path) -> None:
    run = fit(tmp_path, built(Net), [Diagnostics(log_dir=tmp_path)], accumulate_grad_batches=3)
    assert run.global_step == 6

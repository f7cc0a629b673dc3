"""What only the trainer tells: evaluations, metrics, clipping, accumulation, samplers, and the weights under test."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.lightning.runs import BATCHES, Net, built, data, fit, half, watched
from tests.torch.left_behind import left_behind
from tests.torch.runs import Everything
from trainvet.callbacks.lightning import Diagnostics


class Logged(Net):
    """Logs in every hook, and keeps what it logged."""

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))


def test_evaluations_come_at_the_step_before_them(tmp_path: Path) -> None:
    net = built(Logged)
    seen, vet = watched(tmp_path, net, val=data(batches=12, seed=3), num_sanity_val_steps=2)
    last = [BATCHES - 1, 2 * BATCHES - 1]
    inputs = seen.sampled("validation_input.std")
    assert list(inputs) == last
    assert all(20 < column["input"] < 40 for column in inputs.values()), "thirty times the training's"
    assert seen.sampled("validation_input.count")[last[0]] == {"input": 32}, "of twelve batches eight are looked at"
    modes = seen.sampled("validation_module.training")
    assert set(modes[last[0]].values()) == {0.0}
    metrics = [(snapshot.step, name, track.values[-1]) for snapshot in seen.seen for name, track in snapshot.tracks("metric.value").items()]
    assert [(step, name) for step, name, _ in metrics if name == "val_loss"] == [(step, "val_loss") for step in last]
    assert [(step, value) for step, name, value in metrics if name == "late"] == list(zip(last, (0.0, 1.0), strict=True))
    assert metrics[-1][2] == 1.0
    assert vet.report.steps == 2 * BATCHES
    assert left_behind(net) == []


def test_two_evaluations_in_one_epoch_are_told_apart(tmp_path: Path) -> None:
    seen, _ = watched(tmp_path, built(Net), val=data(batches=2), val_check_interval=0.5, max_epochs=1)
    assert list(seen.series("metric.value", "val_loss")) == [3, 7]


def test_clipping_by_norm_is_known_exactly_at_every_step(tmp_path: Path) -> None:
    net = built(Net)
    seen, _ = watched(tmp_path, net, gradient_clip_val=0.3, every=50)
    expected = {step: min(1.0, 0.3 / (norm + 1e-6)) for step, norm in enumerate(net.norms)}
    assert seen.series("run.clip_scale") == pytest.approx(expected, rel=1e-4)
    assert min(expected.values()) < 0.9
    assert (seen.plans[0].clipping, seen.plans[0].clipping_by) == (0.3, "norm")


def test_clipping_by_value_is_measured_on_sampled_steps(tmp_path: Path) -> None:
    after: list[float] = []

    class Clipped(Net):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            after.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None)))

    net = built(Clipped)
    seen, _ = watched(tmp_path, net, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_epochs=1)
    assert seen.series("run.clip_scale") == pytest.approx({step: a / b for step, (a, b) in enumerate(zip(after, net.norms, strict=True))}, rel=1e-4)
    assert seen.plans[0].clipping_by == "value"


def test_lightnings_clipping_of_0_is_off(tmp_path: Path) -> None:
    seen, _ = watched(tmp_path, built(Net), gradient_clip_val=0.0, max_epochs=1)
    assert seen.plans[0].clipping is None
    assert set(seen.series("run.clip_scale").values()) == {1.0}


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulated_steps_have_a_size_and_a_noise_scale(tmp_path: Path, scaled: bool) -> None:
    more = {"plugins": [half()]} if scaled else {}
    seen, _ = watched(tmp_path, built(Net), accumulate_grad_batches=4, max_epochs=3, **more)
    assert seen.series("run.batch_size") == dict.fromkeys(range(6), 16.0)
    assert seen.series("run.stale_gradient") == dict.fromkeys(range(6), 0.0)
    noise = seen.series("run.noise_scale")
    assert noise
    assert all(0 <= value < math.inf for value in noise.values())
    shares = seen.sampled("gradient.underflow_share")
    assert bool(shares) is scaled
    assert all(0 <= value <= 1 for column in shares.values() for value in column.values())


def test_a_trainer_that_clears_nothing_is_seen(tmp_path: Path) -> None:
    class Piling(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            return None

    seen, _ = watched(tmp_path, built(Piling), max_epochs=1)
    assert seen.series("run.stale_gradient") == {0: 0.0} | dict.fromkeys(range(1, BATCHES), 1.0)


def test_waiting_for_data_is_told_apart_from_evaluations_and_checkpoints(tmp_path: Path) -> None:
    class Slow(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.3)

    def late(batch: Any) -> Any:
        time.sleep(0.03)
        return torch.utils.data.default_collate(batch)

    seen, _ = watched(tmp_path, built(Slow), loader=data(collate_fn=late), val=data(batches=1), val_check_interval=0.5, max_epochs=1)
    waits, steps = seen.series("run.wait_seconds"), seen.series("run.step_seconds")
    assert list(steps) == list(range(1, BATCHES))
    assert all(waits[step] <= steps[step] < 0.3 for step in steps)
    assert sorted(waits.values())[len(waits) // 2] > 0.02


def test_what_samplers_and_callbacks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    seen, _ = watched(tmp_path / "a", built(Net), loader=data(shuffle=True), max_epochs=1)
    facts = seen.plans[0]
    assert (facts.shuffled, facts.balanced, facts.batches_per_epoch, facts.samples_per_epoch) == (True, False, BATCHES, 4 * BATCHES)
    assert (facts.seeded, facts.deterministic, facts.processes, facts.repeats_batches, facts.finetuning) == (False, False, 1, False, False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    sampler = WeightedRandomSampler(torch.ones(32).tolist(), 12)
    loader = DataLoader(data().dataset, batch_size=4, sampler=sampler)
    seen, _ = watched(tmp_path / "b", built(Net), loader=loader, overfit_batches=2, max_epochs=1)
    assert (seen.plans[0].seeded, seen.plans[0].repeats_batches, seen.plans[0].samples_per_epoch) == (True, True, 8)
    seen, _ = watched(tmp_path / "c", built(Net), loader=loader, max_epochs=1)
    assert (seen.plans[0].shuffled, seen.plans[0].balanced, seen.plans[0].samples_per_epoch) == (True, True, 12)
    seen, _ = watched(tmp_path / "d", built(Net), max_epochs=1)
    assert seen.plans[0].shuffled is False


def test_what_is_expected_reaches_the_rules(tmp_path: Path) -> None:
    seen = Everything()
    fit(tmp_path, built(Net), [Diagnostics(log_dir=tmp_path, select=(), rules=[seen], expect={"val_acc": 0.9})], max_epochs=1)
    assert all(facts.expect == {"val_acc": 0.9} for facts in seen.plans)
    with pytest.raises(ValueError, match="val_acc"):
        Diagnostics(expect={"val_acc": "high"})  # type: ignore[dict-item]


class Examined(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.as_tensor(self.net(batch[0]))


def examined(tmp_path: Path, *more: Any, **arguments: Any) -> tuple[pl.Trainer, Examined, Everything, Diagnostics]:
    seen = Everything()
    vet = Diagnostics(log_dir=tmp_path, select=("MO110",), rules=[seen])
    net = built(Examined)
    return fit(tmp_path, net, [vet, *more], max_epochs=2, **arguments), net, seen, vet


def test_the_trained_weights_and_those_of_a_checkpoint_are_no_others(tmp_path: Path) -> None:
    run, net, seen, vet = examined(tmp_path, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        run.test(net, data(), verbose=False)
    run.predict(net, data())
    assert list(seen.series("run.other_weights").values()) == [0.0]
    other = built(Examined)
    other.load_state_dict(torch.load(run.checkpoint_callback.best_model_path, weights_only=True)["state_dict"])  # type: ignore[union-attr]
    run.test(other, data(), verbose=False)
    assert list(seen.series("run.other_weights").values()) == [0.0]
    assert (vet.report.findings, vet.report.errors) == ((), ())


def test_a_model_built_anew_is_told(tmp_path: Path) -> None:
    run, _, _, vet = examined(tmp_path)
    with pytest.warns(UserWarning, match="weights under test"):
        run.test(built(Examined), data(), verbose=False)
    assert [item.code for item in vet.report.findings] == ["MO110"]
    assert vet.report.errors == ()


def test_averaged_weights_are_not_judged(tmp_path: Path) -> None:
    run, _, seen, vet = examined(tmp_path, StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1))
    run.test(built(Examined), data(), verbose=False)
    assert seen.series("run.other_weights") == {}
    assert vet.report.findings == ()

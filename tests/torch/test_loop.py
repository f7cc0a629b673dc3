"""watch() around hand-written loops."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.left_behind import attributes, everything, left_behind, plain
from tests.torch.runs import Everything
from trainvet.action import TrainingAborted
from trainvet.callbacks.loop import Watch, watch
from trainvet.integrations.torch.probe import Probe
from trainvet.watchpoint import Watchpoint

NAN = float("nan")


def batches(count: int = 16, poison: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(8, 4, generator=generator) * (NAN if index in poison else 1.0) for index in range(count)]
    return [(x, x[:, :1].nan_to_num() + 0.1) for x in xs]


def criterion(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))


class Loop:
    """One way of writing a loop; ``train`` runs it with ``vet``, or bare with None, and notes losses and true norms."""

    def __init__(
        self, optimizer: Any = torch.optim.AdamW, scaler: bool = False, accumulate: int = 1, poison: tuple[int, ...] = (), **arguments: Any
    ) -> None:
        self.model = model()
        self.optimizer = optimizer(self.model.parameters(), **({"lr": 0.01} | arguments))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5) if scaler else None
        self.accumulate, self.data = accumulate, batches(poison=poison)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first: list[int] = []  # of the evaluations of each step: L-BFGS makes several
        torch.manual_seed(1)

    def note(self, loss: Tensor) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.losses.append(float(loss.detach()))
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def train(self, vet: Watch | None) -> None:
        for index, (x, target) in enumerate(self.data):
            random.random()
            np.random.rand()
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.first.append(len(self.losses))
                self.optimizer.step(lambda: self.evaluate(x, target, vet))  # noqa: B023
                continue
            loss = criterion(self.model(x), target)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if (index + 1) % self.accumulate:
                continue
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.note(loss)
            if vet is not None:
                vet.step(loss)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()

    def evaluate(self, x: Tensor, target: Tensor, vet: Watch | None) -> Tensor:
        self.optimizer.zero_grad()
        loss = criterion(self.model(x), target)
        loss.backward()
        self.note(loss)
        if vet is not None:
            vet.step(loss)
        return loss


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "SGD with momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "scaler": {"scaler": True},
    "scaler with overflows": {"scaler": True, "poison": (3, 4, 11)},
    "accumulation": {"accumulate": 4},
    "L-BFGS": {"optimizer": torch.optim.LBFGS, "max_iter": 3},
    "NaN, and nobody asked to stop": {"poison": (5,)},
}


def run(directory: Path, name: str, **arguments: Any) -> tuple[Loop, Everything, Watch]:
    loop, seen = Loop(**LOOPS[name]), Everything()
    with watch(loop.model, loop.optimizer, scaler=loop.scaler, log_dir=directory, select=(), rules=[seen], **arguments) as vet:
        loop.train(vet)
    assert vet.report.errors == ()
    assert vet.report.status == "finished"
    return loop, seen, vet


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("name", LOOPS)
def test_training_is_the_same_bit_for_bit_and_numbers_are_the_users(tmp_path: Path, name: str, every: int) -> None:
    random.seed(0)
    np.random.seed(0)
    bare = Loop(**LOOPS[name])
    names = attributes(bare.model)
    bare.train(None)
    expected = everything(bare.model, [bare.optimizer])
    random.seed(0)
    np.random.seed(0)
    loop, seen, vet = run(tmp_path, name, every=every)
    assert everything(loop.model, [loop.optimizer]) == expected
    assert left_behind(loop.model, [loop.optimizer]) == []
    assert attributes(loop.model) == names
    taken = loop.first or range(len(loop.losses))
    assert list(seen.series("run.gradient_norm").values()) == pytest.approx([loop.norms[index] for index in taken], rel=1e-5, nan_ok=True)
    assert list(seen.series("loss.value").values()) == pytest.approx([loop.losses[index] for index in taken], rel=1e-5, nan_ok=True)
    assert sorted(seen.series("loss.value")) == list(range(len(taken)))
    assert vet.report.applied == vet.report.steps - (3 if name == "scaler with overflows" else 0)


def test_a_step_that_the_scaler_skips_is_told(tmp_path: Path) -> None:
    _, seen, _ = run(tmp_path, "scaler with overflows", every=1)
    assert [step for step, value in seen.series("run.skipped").items() if value] == [3, 4, 11]
    assert seen.series("run.loss_scale")[5] == 2.0**8
    assert sorted(seen.sampled("update.ratio")) == [step for step in range(16) if step not in (3, 4, 11)]


def test_gradients_that_are_still_scaled_are_told_unscaled(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with watch(loop.model, loop.optimizer, scaler=scaler, log_dir=tmp_path, select=(), rules=[seen]) as vet:
        for x, target in loop.data:
            loss = criterion(loop.model(x), target)
            scaler.scale(loss).backward()
            loop.note(loss)
            vet.step(loss)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
    assert list(seen.series("run.gradient_norm").values()) == pytest.approx([norm / 2**10 for norm in loop.norms], rel=1e-4)


def test_the_look_sees_the_model_from_its_outside(tmp_path: Path) -> None:
    _, seen, _ = run(tmp_path, "plain")
    facts = seen.plans[-1]
    assert sorted(facts.of("input")) == ["input"]
    assert sorted(facts.of("label")) == ["label"]
    assert [loss.kind for loss in facts.losses] == ["regression"]
    assert list(facts.of("activation")) == ["0", "1", "2", "3", "4", "5", "6"]
    assert seen.sampled("input.std")[0]["input"] == pytest.approx(1.0, abs=0.3)


def test_a_model_that_is_one_layer_and_takes_keywords(tmp_path: Path) -> None:
    class Layer(nn.Linear):
        def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    seen = Everything()
    for layer, call in ((nn.Linear(4, 1), lambda m, x: m(x)), (Layer(4, 1), lambda m, x: m(x=x))):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        with watch(layer, optimizer, log_dir=tmp_path, select=(), rules=[seen], every=1) as vet:
            for x, target in batches(3):
                loss = criterion(call(layer, x), target)
                loss.backward()
                vet.step(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert vet.report.errors == ()
        assert sorted(seen.sampled("activation.mean")) == [0, 1, 2]


def test_evaluation_in_between_is_not_looked_at(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, select=(), rules=[seen], every=1) as vet:
        for x, target in loop.data:
            loop.model.eval()
            with torch.no_grad():
                loop.model(1000 * x)
            loop.model.train()
            with torch.no_grad():
                loop.model(1000 * x)
            loss = criterion(loop.model(x), target)
            loss.backward()
            vet.step(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert max(row["input"] for row in seen.sampled("input.max").values()) < 10


def test_two_optimizers(tmp_path: Path) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    both = nn.Sequential(one, two)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01), torch.optim.Adam(two.parameters(), lr=0.01)]
    seen = Everything()
    with watch(both, optimizers, log_dir=tmp_path, select=(), rules=[seen], every=3) as vet:
        for x, target in batches(12):
            for optimizer in optimizers:
                loss = criterion(both(x), target)
                both.zero_grad()
                loss.backward()
                vet.step(loss, optimizer)
                optimizer.step()
    assert vet.report.steps == vet.report.applied == 24
    for step, norms in seen.sampled("gradient.norm").items():
        assert all(name.startswith(str(step % 2)) for name in norms)
    late = [step % 2 for step in seen.sampled("gradient.norm") if step > 12]
    assert sorted(set(late)) == [0, 1]


def test_a_compiled_model_is_watched_without_its_inside(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    compiled = torch.compile(loop.model, backend="eager")
    with watch(compiled, loop.optimizer, log_dir=tmp_path, select=(), rules=[seen], every=1) as vet:  # type: ignore[arg-type]
        for x, target in loop.data[:4]:
            loss = criterion(compiled(x), target)
            loss.backward()
            vet.step(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert vet.report.errors == ()
    assert vet.report.steps == 4
    assert sorted(seen.sampled("gradient.norm")) == [0, 1, 2, 3]
    assert seen.sampled("activation.mean") == {}
    assert "compiled" in seen.plans[-1].unobservable["activation"]


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="hooks of a module compiled in place run in newer torch only")
def test_a_model_compiled_in_place_loses_no_step(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    loop.model.compile(backend="eager")
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, select=(), rules=[seen]) as vet:
        loop.train(vet)
    assert sorted(seen.series("loss.value")) == list(range(16))


# ---- ends


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "after the backward", "after the step"])
def test_nothing_stays_after_an_error(tmp_path: Path, error: type[BaseException], place: str) -> None:
    loop = Loop()

    def fails(index: int, now: str) -> None:
        if (index, now) == (3, place):
            raise error("boom")

    vet = watch(loop.model, loop.optimizer, log_dir=tmp_path, every=1)

    def train() -> None:
        for index, (x, target) in enumerate(loop.data):
            handle = loop.model[4].register_forward_hook(lambda *args: fails(index, "forward"))  # type: ignore[index]  # noqa: B023
            try:
                y = loop.model(x)
            finally:
                handle.remove()
            loss = criterion(y, target)
            loss.backward()
            fails(index, "after the backward")
            vet.step(loss)
            loop.optimizer.step()
            fails(index, "after the step")
            loop.optimizer.zero_grad()

    with pytest.raises(error, match="boom"), vet:
        train()
    assert left_behind(loop.model, [loop.optimizer]) == []
    assert vet.report.status == "failed"
    assert vet.report.reason.endswith("boom")


@pytest.mark.parametrize("name", ["plain", "fused", "SGD with momentum"])
def test_an_abort_holds_the_update_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    loop = Loop(**(LOOPS[name] | {"poison": (5,)}))
    kept: list[Any] = []
    note = loop.note
    loop.note = lambda loss: (kept.append(plain([loop.model.state_dict(), loop.optimizer.state_dict()])), note(loss))[1]  # type: ignore
    vet = watch(loop.model, loop.optimizer, log_dir=tmp_path, select=["NF101"], abort_on="error")
    with pytest.raises(TrainingAborted) as caught, vet:
        loop.train(vet)
    weights = {name: value for name, value in kept[5][0].items() if "running" not in name and "tracked" not in name}
    now = plain([loop.model.state_dict(), loop.optimizer.state_dict()])
    assert {name: now[0][name] for name in weights} == weights
    assert now[1] == kept[5][1]
    assert all(bool(torch.isfinite(value).all()) for value in loop.model.state_dict().values())
    assert left_behind(loop.model, [loop.optimizer]) == []
    assert "step 5" in str(caught.value)
    assert vet.report.status == "aborted"


def test_an_abort_after_the_step_leaves_nothing(tmp_path: Path) -> None:
    loop = Loop()
    point = Watchpoint("weight.norm", above=0.0, severity="error", name="always")
    vet = watch(loop.model, loop.optimizer, log_dir=tmp_path, select=(), rules=[point], abort_on="always")
    with pytest.raises(TrainingAborted, match="always"), vet:
        loop.train(vet)
    assert len(loop.losses) == 1
    assert left_behind(loop.model, [loop.optimizer]) == []


def test_a_graceful_stop_is_the_loops_to_make(tmp_path: Path) -> None:
    loop = Loop(poison=(5, 9))
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, select=["NF101"], abort_on="error", abort="stop") as vet:
        assert not vet.stopped
        loop.train(vet)
    assert vet.stopped
    assert vet.report.status == "aborted"
    assert "step 5" in vet.report.reason
    assert all(bool(torch.isfinite(value).all()) for value in loop.model.state_dict().values())


def test_bad_updates_are_dropped(tmp_path: Path) -> None:
    loop = Loop(poison=(3, 4, 9))
    vet = watch(loop.model, loop.optimizer, log_dir=tmp_path, select=(), rules=[seen := Everything()], skip_bad_updates=2)
    with pytest.raises(TrainingAborted, match="no more bad updates are allowed"), vet:
        loop.train(vet)
    assert (vet.report.steps, vet.report.applied) == (10, 7)
    assert [step for step, value in seen.series("run.skipped").items() if value] == [3, 4]


def test_the_module_that_made_a_nan_is_named(tmp_path: Path) -> None:
    class Log(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return torch.log(x - 10 - x.abs()) if 5 < type(self).calls < 20 else x

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loop = Loop()
    loop.model, loop.optimizer = module, optimizer
    with watch(module, optimizer, log_dir=tmp_path, select=["NF101"], abort_on="error") as vet, pytest.raises(TrainingAborted):
        loop.train(vet)
    head = vet.report.findings[0]
    assert (head.where, head.step, head.evidence["batch"]) == ("1", 5, 5)
    assert vet.report.steps == 6, "the replay's own forward is no step"


def test_a_fault_in_the_loss_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    loop = Loop()
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, select=["NF101"]) as vet:
        loss = torch.log(-1 - loop.model(loop.data[0][0]).square().mean())
        loss.backward()
        vet.step(loss)
    assert vet.report.findings[0].where == "loss"


# ---- errors of ours, and off


@pytest.mark.parametrize("method", ["forward", "gradients", "updated", "poll", "facts"])
def test_an_error_of_ours_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    bare = Loop()
    bare.train(None)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Probe, method, fails)
    loop = Loop()
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, every=1) as vet:
        loop.train(vet)
    assert plain(loop.model.state_dict()) == plain(bare.model.state_dict())
    assert left_behind(loop.model, [loop.optimizer]) == []
    (error,) = vet.report.errors
    assert "Traceback" in error
    assert "ZeroDivisionError: ours" in error
    assert "measuring was switched off" in error


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINVET", "off")
    loop = Loop()
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, abort_on="error") as vet:
        loop.train(vet)
        assert left_behind(loop.model, [loop.optimizer]) == []
    assert vet.report.steps == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": 0}, "a run without steps has nothing to watch"),
        ({"scheduler_interval": "batch"}, 'must be "step" or "epoch"'),
        ({"select": ["GR1O1"]}, "did you mean"),
        ({"optimizer": []}, "must be a torch optimizer"),
        ({"model": "net"}, "must be a torch.nn.Module"),
    ],
)
def test_bad_input(arguments: dict[str, Any], text: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=text):
        watch(**({"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)} | arguments))


def test_a_schedule_by_epochs_of_unknown_length_is_not_guessed(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3)
    arguments = {"scheduler": scheduler, "steps": 16, "select": (), "rules": [seen], "log_dir": tmp_path}
    with watch(loop.model, loop.optimizer, scheduler_interval="epoch", **arguments):
        pass
    with watch(loop.model, loop.optimizer, scheduler_interval="epoch", steps_per_epoch=4, **arguments):
        pass
    assert [len(plan.schedules) for plan in seen.plans] == [0, 1]
    assert seen.plans[1].schedules[0].curve.tolist() == pytest.approx([0.01] * 12 + [0.001] * 4)


def test_the_loss_is_a_number_of_the_user_even_when_it_is_negative_or_large(tmp_path: Path) -> None:
    loop, seen = Loop(), Everything()
    with watch(loop.model, loop.optimizer, log_dir=tmp_path, select=(), rules=[seen]) as vet:
        for factor in (-1.0, 1e30, 1e-30):
            loss = loop.model(loop.data[0][0]).square().mean() * factor
            loss.backward()
            vet.step(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            assert math.isfinite(float(loss.detach()))
    assert [math.copysign(1, value) for value in seen.series("loss.value").values()] == [-1, 1, 1]

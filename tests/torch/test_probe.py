"""The probe driven by hand, in the form in which numbers are read late, as on a GPU, and in the form that reads before the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.left_behind import left_behind, plain
from tests.torch.runs import Driven, net, steps
from trainvet.integrations.torch import kernels
from trainvet.integrations.torch.guard import Guard
from trainvet.integrations.torch.plan import Sketch
from trainvet.integrations.torch.probe import LAG, Known
from trainvet.integrations.torch.readback import Readback

FUSED: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


def driven(optimizer: Any = FUSED["AdamW"], module: nn.Module | None = None, **arguments: Any) -> Driven:
    module = net() if module is None else module
    return Driven(module, optimizer(module.parameters()), **arguments)


class Late(Readback[Any]):
    """Rows arrive ``lag`` steps late, as on a busy device."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self.lag = lag
        self.waiting: list[tuple[int, Any]] = []
        self.polls = 0

    def send(self, row: Tensor, note: Any) -> bool:
        self.waiting.append((self.polls + 1 + self.lag, note))
        return super().send(row, note)

    def poll(self, wait: bool = False) -> list[Any]:
        self.polls += 1
        ready = sum(due <= self.polls for due, _ in self.waiting)
        everything = super().poll(wait=True)
        if wait:
            self.waiting = []
            return everything
        self.waiting = self.waiting[ready:]
        for values, note in everything[ready:]:
            super().send(torch.from_numpy(values), note)
        return everything[:ready]


def states(run: Driven) -> Any:
    return plain([run.module.state_dict(), *(optimizer.state_dict() for optimizer in run.optimizers)])


# ---- the two forms see the same


@pytest.mark.parametrize("every", [1, 5])
def test_numbers_read_late_are_those_read_at_once(every: int) -> None:
    early, late = driven(every=every), driven(every=every, before_update=False)
    for run in (early, late):
        steps(run, 16)
        run.end()
    for key in ("run.gradient_norm", "loss.value", "optimizer.learning_rate"):
        assert late.seen.series(key) == pytest.approx(early.seen.series(key), rel=1e-6), key
    for key in ("gradient.norm", "gradient.abs_max", "weight.std", "update.ratio", "activation.std", "input.mean", "buffer.abs_max"):
        right, got = early.seen.sampled(key), late.seen.sampled(key)
        assert sorted(got) == sorted(right), key
        for step, row in right.items():
            assert got[step] == pytest.approx(row, rel=1e-4, abs=1e-7), (key, step)


@pytest.mark.parametrize("lag", [1, 3, 7])
def test_rows_that_arrive_late_are_all_seen_in_order_and_sampled_no_more_often(lag: int) -> None:
    run = driven(every=6, before_update=False)
    run.probe._readback = Late(lag)
    steps(run, 40)
    run.end()
    told = [snapshot.step for snapshot in run.seen.seen]
    assert told == sorted(set(told))
    assert sorted(run.seen.series("loss.value")) == list(range(40))
    assert sorted(run.seen.sampled("gradient.norm")) == [*range(10), 15, 21, 27, 33, 39]


def test_a_full_ring_drops_rows_counts_them_and_waits_for_nothing() -> None:
    ring: Readback[int] = Readback(slots=2)

    class Row:
        """A row on a device that is not there."""

        device = torch.device("meta")

    ring._flying.extend([(None, 0), (None, 1)])  # type: ignore[list-item]
    assert ring.send(Row(), 2) is False  # type: ignore[arg-type]
    assert ring.dropped == 1


# ---- the guard on the device


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", FUSED)
def test_from_the_first_bad_step_on_every_update_is_a_no_op(name: str, lag: int) -> None:
    run = driven(FUSED[name], guard=Guard(True, 0), before_update=False, every=50)
    run.probe._readback = Late(lag)
    steps(run, 5)
    weights = states(run)
    poisoned = run.probe.step
    generator = torch.Generator().manual_seed(1)
    for index in range(4):
        run.step(torch.randn(8, 4, generator=generator) * (float("nan") if index == 0 else 1.0))
        now = states(run)
        assert [value for key, value in now[0].items() if "running" not in key and "tracked" not in key] == [
            value for key, value in weights[0].items() if "running" not in key and "tracked" not in key
        ]
        assert now[1] == weights[1]
        assert left_behind(run.module, run.optimizers) == []
        if run.probe.lost:
            break  # an edge ends the run here
    assert run.probe.lost
    assert run.probe.step == poisoned + 1 + lag
    run.observe(run.probe.poll(drain=True))
    assert states(run)[0] == weights[0], "statistics of normalisation layers too"
    assert [step for step, value in run.seen.series("loss.value").items() if math.isnan(value)] == [poisoned]
    assert run.monitor.applied == 5
    assert run.seen.series("run.skipped")[poisoned] == 0, "the step that ends the run is no skipped step"
    run.end()


def test_an_armed_guard_that_has_nothing_to_hold_changes_nothing() -> None:
    bare, guarded = driven(before_update=False), driven(before_update=False, guard=Guard(True, 0))
    for run in (bare, guarded):
        steps(run, 20)
        run.end()
    assert states(bare) == states(guarded)


def test_bad_updates_are_dropped_on_the_device_up_to_a_number() -> None:
    run = driven(guard=Guard(False, 2), before_update=False, every=50)
    run.probe._readback = Late(2)
    steps(run, 20, poison=[3, 4])
    run.observe(run.probe.poll(drain=True))
    assert not run.probe.lost
    assert [step for step, value in run.seen.series("run.skipped").items() if value] == [3, 4]
    assert run.monitor.applied == 18
    assert all(bool(torch.isfinite(value).all()) for value in run.module.state_dict().values())
    steps(run, 1, poison=[0])
    run.observe(run.probe.poll(drain=True))
    assert run.probe.lost


def test_what_cannot_be_held_is_said() -> None:
    plain_adam = driven(lambda p: torch.optim.AdamW(p, foreach=True), guard=Guard(True, 0), before_update=False)
    assert "only fused Adam" in plain_adam.monitor.notes[0]
    assert driven(guard=Guard(True, 0), before_update=False).monitor.notes == []
    steps(plain_adam, 3, poison=[2])
    assert not left_behind(plain_adam.module, plain_adam.optimizers)


def test_two_fused_optimizers_share_the_latch_and_both_are_disarmed() -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.AdamW(module[index].parameters(), fused=True) for index in (0, 1)]  # type: ignore[index]
    run = Driven(module, optimizers, guard=Guard(True, 0), before_update=False, every=50)
    steps(run, 3)
    weights = states(run)
    steps(run, 2, poison=[0])
    assert states(run) == weights
    assert left_behind(module, optimizers) == []


# ---- alarms


class Batches:
    """A replay that notes what it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.depth, self.asked = module, 1, []  # type: ignore[var-annotated]
        self.kept: dict[int, Tensor] = {}

    def runs(self, step: int) -> list[tuple[int, Callable[[], Tensor | None]]]:
        self.asked.append(step)
        x = self.kept.get(step)
        return [] if x is None or not self.depth else [(step, lambda: self.module(x).square().mean())]


def faulty(before_update: bool, guard: Guard | None, fused: bool = True) -> tuple[Driven, Batches]:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 50, torch.log(-x), x)

    module = net(nn.Linear(4, 4), Log(), nn.Linear(4, 1))
    replay = Batches(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    run = Driven(module, optimizer, select=["NF101"], guard=guard, before_update=before_update, replay=replay, every=50)
    generator = torch.Generator().manual_seed(2)
    for index in range(8):
        x = torch.randn(8, 4, generator=generator) * (1e4 if index == 6 else 1.0)
        replay.kept[run.probe.step] = x
        run.step(x)
    run.observe(run.probe.poll(drain=True))
    run.probe.close()
    return run, replay


@pytest.mark.parametrize("before_update", [True, False])
def test_the_place_is_found_where_the_weights_are_still_clean(before_update: bool) -> None:
    run, replay = faulty(before_update, Guard(True, 0))
    assert replay.asked == [6]
    assert replay.depth == (1 if before_update else LAG)
    (finding,) = run.monitor.report.findings
    assert (finding.code, finding.where, finding.step) == ("NF101", "1", 6)


def test_without_a_guard_a_late_alarm_says_that_the_weights_have_moved() -> None:
    run, replay = faulty(False, None)
    assert replay.depth == 0
    finding = run.monitor.report.findings[0]
    assert (finding.code, finding.step) == ("NF101", 6)
    assert finding.evidence["replay"] == "the batch was not run again: weights have moved since"


def test_a_late_alarm_is_told_at_once_and_not_with_the_next_block_of_rows() -> None:
    run = driven(before_update=False, every=50)
    steps(run, 12)
    assert run.probe.block > 16 - 1
    run.step(torch.full((8, 4), float("nan")))
    assert run.seen.seen[-1].urgent
    assert run.seen.seen[-1].step == 12


def test_gradients_that_are_bad_are_counted_before_the_update() -> None:
    run = driven(every=50)
    steps(run, 12)
    run.step(torch.randn(8, 4), lambda y: torch.sqrt((y - y.detach()).abs()).mean())
    urgent = run.seen.seen[-1]
    assert urgent.urgent
    assert urgent.column("weight.nan")[1].sum() == 0  # type: ignore[index]
    assert urgent.column("gradient.nan")[1].sum() + urgent.column("gradient.inf")[1].sum() > 0  # type: ignore[index]
    assert math.isfinite(run.seen.series("loss.value")[12])


# ---- errors of ours


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ArithmeticError("ours")


def test_an_error_in_the_forward_of_a_sampled_step_blinds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = driven(every=1)
    steps(run, 2)
    monkeypatch.setattr("trainvet.integrations.torch.activations.Look._reduce", broken)
    steps(run, 3)
    assert len(run.monitor.errors) == 1
    assert "ArithmeticError: ours" in run.monitor.errors[0]
    assert "Traceback" in run.monitor.errors[0]
    assert sorted(run.seen.sampled("activation.mean")) == [0, 1]
    assert sorted(run.seen.sampled("gradient.norm")) == list(range(5))
    assert "an error inside trainvet" in run.seen.plans[-1].unobservable["activation"]
    run.probe.close()
    assert left_behind(run.module, run.optimizers) == []


# ---- what is measured


def test_float16_gradients_do_not_overflow() -> None:
    module = nn.Linear(100, 1, bias=False).half()
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.0), every=1)
    run.step(torch.full((1, 100), 3e4, dtype=torch.float16), lambda y: y.sum() * 1.0)
    assert run.seen.series("run.gradient_norm")[0] == pytest.approx(3e5, rel=1e-3)
    run.end()


def test_a_loss_that_is_no_scalar_tensor() -> None:
    run = driven(every=1)
    run.step(torch.randn(8, 4), lambda y: y.square().mean().reshape(1))
    assert len(run.seen.series("loss.value")) == 1
    run.end()


def test_a_tensor_learning_rate_is_read_with_the_row() -> None:
    module = net()
    rate = torch.tensor(0.25)
    run = Driven(module, torch.optim.AdamW(module.parameters(), lr=rate, foreach=False), before_update=False)
    steps(run, 3)
    rate.fill_(0.125)
    steps(run, 1)
    run.end()
    assert run.seen.series("optimizer.learning_rate") == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.125}


def test_manual_steps_of_one_optimizer_within_one_batch_all_count() -> None:
    run = driven(every=1, known=Known(manual_optimization=True))
    x = torch.randn(8, 4)
    run.probe.forward((x,), 0, 0)
    for _ in range(3):
        loss = run.module(x).square().mean()
        run.optimizers[0].zero_grad()
        run.probe.loss(loss)
        loss.backward()
        run.observe(run.probe.gradients(run.optimizers[0]))
        run.optimizers[0].step()
    run.probe.updated()
    run.observe(run.probe.poll(drain=True))
    assert sorted(run.seen.series("run.gradient_norm")) == [0, 1, 2]
    assert sorted(run.seen.sampled("gradient.norm")) == [0, 1, 2]


def test_gradients_given_as_sparse_are_measured() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(3000, 4, sparse=True)
    run = Driven(table, torch.optim.SparseAdam(table.parameters()), every=1)
    run.step(torch.tensor([5, 7, 5]))
    norm = kernels.norms([table.weight.grad])
    assert run.seen.series("run.gradient_norm")[0] == pytest.approx(float(norm))
    assert run.seen.sampled("update.ratio")[0]["weight"] > 0, "the rows that move are looked at"
    run.end()


def test_rows_of_a_large_table_that_were_not_touched_are_not_looked_at() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(3000, 4)
    run = Driven(table, torch.optim.SGD(table.parameters(), lr=0.1), every=1)
    run.step(torch.tensor([5, 7, 5]))
    assert run.seen.sampled("update.unchanged")[0] == {"weight": 0.0}
    assert run.seen.sampled("update.ratio")[0]["weight"] > 0
    run.end()


def test_a_parameter_that_never_moves_is_compared_in_full() -> None:
    """The random sample says unchanged; the one element that moves shows from the fourth sample on."""
    torch.manual_seed(0)
    module = nn.Linear(100, 100, bias=False)
    run = Driven(module, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
    (sample,) = Sketch(run.probe.plan.owned[0], frozenset()).indices
    assert sample is not None
    mask = torch.zeros(10_000)
    mask[min(set(range(10_000)) - set(sample.tolist()))] = 1.0
    for _ in range(6):
        run.step(torch.randn(4, 100), lambda y: (module.weight.reshape(-1) * mask).sum() + 0 * y.sum())
    assert [run.seen.sampled("update.unchanged")[step]["weight"] for step in range(6)] == [1, 1, 1, 0, 1, 1]
    run.end()


def test_norms_of_every_parameter_add_up() -> None:
    run = driven(every=1)
    steps(run, 2)
    for step, norms in run.seen.sampled("gradient.norm").items():
        assert np.sqrt(np.square(list(norms.values())).sum()) == pytest.approx(run.seen.series("run.gradient_norm")[step], rel=1e-6)

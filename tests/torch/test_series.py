"""Series and update columns against numbers worked out by hand, in a driven probe and in plain loops."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch.left_behind import left_behind
from tests.torch.runs import Driven, Everything
from trainvet.callbacks.loop import watch
from trainvet.integrations.torch import host, kernels
from trainvet.integrations.torch.cycle import noise_scale
from trainvet.integrations.torch.pace import Pace
from trainvet.integrations.torch.precision import underflow_share


def looped(directory: Path, model: nn.Module, body: Any, count: int = 4, lr: float = 0.1, **arguments: Any) -> tuple[Everything, Any]:
    """A loop that measures everything; ``body(model, optimizer, vet, index)`` is one step."""
    seen = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with watch(model, optimizer, log_dir=directory, select=(), rules=[seen], **arguments) as vet:
        for index in range(count):
            body(model, optimizer, vet, index)
    assert vet.report.errors == ()
    assert left_behind(model) == []
    return seen, vet


def batch(index: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("by", ["norm", "value", "nothing"])
def test_what_clipping_did_is_the_ratio_of_the_norms(tmp_path: Path, by: str) -> None:
    expected = []

    def body(model: nn.Module, optimizer: Any, vet: Any, index: int) -> None:
        optimizer.zero_grad()
        loss = 10 * model(batch(index)).square().mean()
        loss.backward()
        vet.step(loss)
        before = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        if by == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif by == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        expected.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) / before)
        optimizer.step()

    seen, _ = looped(tmp_path, nn.Linear(2, 3), body)
    assert seen.series("run.clip_scale") == pytest.approx(dict(enumerate(expected)), rel=1e-5)
    assert (min(expected) < 0.9) is (by != "nothing")


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_left_over_is_seen_when_the_backward_begins(tmp_path: Path, cleared: bool, set_to_none: bool) -> None:
    def body(model: nn.Module, optimizer: Any, vet: Any, index: int) -> None:
        loss = model(batch(index)).square().mean()
        if cleared:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        vet.step(loss)
        optimizer.step()

    seen, _ = looped(tmp_path, nn.Linear(2, 3), body, lr=1e-3)
    assert seen.series("run.stale_gradient") == {0: 0.0} | dict.fromkeys((1, 2, 3), 0.0 if cleared else 1.0)


def test_accumulation_by_hand_is_no_left_over_gradient_and_has_no_size(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, vet: Any, index: int) -> None:
        for part in range(3):
            loss = model(batch(3 * index + part)).square().mean() / 3
            loss.backward()
        vet.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    seen, _ = looped(tmp_path, nn.Linear(2, 3), body)
    assert seen.series("run.stale_gradient") == dict.fromkeys(range(4), 0.0)
    assert seen.series("run.batch_size") == {}
    reasons = seen.plans[-1].unobservable
    assert {"run.noise_scale", "run.wait_seconds", "run.replica_difference", "metric", "run.other_weights"} <= reasons.keys()


def test_steps_are_timed_and_counted_without_evaluations(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, vet: Any, index: int) -> None:
        optimizer.zero_grad()
        time.sleep(0.05)
        loss = model(batch(index, size=3 + index)).square().mean()
        loss.backward()
        vet.step(loss)
        optimizer.step()
        if index == 1:
            with torch.no_grad():
                model(batch(9))
            time.sleep(0.1)

    seen, _ = looped(tmp_path, nn.Linear(2, 3), body)
    assert seen.series("run.batch_size") == {0: 3, 1: 4, 2: 5, 3: 6}
    assert seen.series("run.step_seconds").keys() == {1, 3}, "the first has no step before it, and an evaluation came before the third"
    assert all(0.05 <= value < 0.5 for value in seen.series("run.step_seconds").values())


def test_waiting_is_told_apart_from_our_own_work_and_from_evaluations() -> None:
    pace = Pace(processes=2)
    x = torch.ones(4, 1)
    pace.batch(x, 0.0)
    pace.step(0.0)
    pace.idle(0.0)
    time.sleep(0.02)
    pace.leave()
    time.sleep(0.2)
    pace.back()
    pace.batch({"x": x}, 0.005)
    time.sleep(0.01)
    pace.batch([x], 0.005)
    cells = pace.step(0.005)
    assert 0.014 < cells["run.wait_seconds"] < 0.15
    assert 0.024 < cells["run.step_seconds"] < 0.15
    assert cells["run.batch_size"] == 16
    pace.idle(0.0)
    pace.spoil()
    pace.batch("no tensor", 0.0)
    assert pace.step(0.0) == {}


def test_the_noise_scale_is_that_of_mccandlish() -> None:
    """Gradients of variance 8 per sample (trace) around a true one of squared norm 2: E|G_B|^2 = 2 + 8/B."""
    assert noise_scale(math.sqrt(2 + 8 / 4), math.sqrt(2 + 8 / 16), 4, 16) == pytest.approx(4.0)
    assert noise_scale(1.0, 1.0, 4, 16) == 0.0
    assert noise_scale(2.0, 0.5, 4, 16) is None, "the estimate of the true gradient is negative"
    assert noise_scale(1.0, 1.0, 4, 4) is None


BEFORE, AFTER = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([1.000005, -2.0, 0.0])
GOLDEN = [(BEFORE, AFTER, 1.0), (BEFORE, torch.tensor([1.1, -2.0, 0.0]), 0.0), (BEFORE, BEFORE, 1.0), (BEFORE, torch.tensor([1.0, -2.0, 2e-8]), 0.0)]


@pytest.mark.parametrize(("before", "after", "close"), GOLDEN)
def test_close_and_relative_change_agree_on_host_and_device(before: torch.Tensor, after: torch.Tensor, close: float) -> None:
    relative = float((after.double() - before.double()).abs().mean() / (before.double().abs().mean() + 1e-9))
    one = host.update_columns(before.numpy(), after.numpy(), [3])
    two = kernels.update_columns([before], [after])
    for columns in (one, two):
        assert float(columns["close"][0]) == close
        assert float(columns["abs_mean_ratio"][0]) == pytest.approx(relative, rel=1e-4, abs=1e-12)


def test_updates_lost_in_bfloat16_are_counted_where_there_is_a_gradient() -> None:
    module = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 0.0]]))
    driven = Driven(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    driven.step(torch.tensor([[1.0, 1.0, 0.0, 1.0]], dtype=torch.bfloat16), loss=lambda y: y.float().sum())
    driven.end()
    # the third has no gradient, the fourth moves from 0; two of three are lost
    assert driven.seen.sampled("update.swallowed_share")[0] == {"weight": pytest.approx(2 / 3)}


def test_no_share_is_told_of_float32() -> None:
    module = nn.Linear(4, 1)
    driven = Driven(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    driven.step(torch.ones(1, 4))
    driven.end()
    assert driven.seen.sampled("update.swallowed_share") == {}
    assert driven.seen.sampled("gradient.underflow_share") == {}


def test_small_scaled_gradients_are_counted() -> None:
    scale = torch.tensor(1024.0)
    gradient = torch.tensor([0.0, 2.0**-25, 2.0**-23, 1.0])
    assert underflow_share([gradient, None], scale, scaled=False).tolist() == pytest.approx([1 / 3, 0])
    assert underflow_share([gradient * scale, torch.zeros(3)], scale, scaled=True).tolist() == pytest.approx([1 / 3, 0])


@pytest.mark.parametrize("arguments", [{}, {"fused": True}, {"foreach": True}])
def test_the_gradient_is_set_against_adams_memory_before_the_step(arguments: dict[str, bool]) -> None:
    module = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, betas=(0.9, 0.99), **arguments)
    driven = Driven(module, optimizer)
    for factor in (1.0, 1.0, 5.0):
        driven.step(torch.ones(2, 3), loss=lambda y, factor=factor: factor * y.sum())  # every element's gradient is 2 * factor
    driven.end()
    found = driven.seen.sampled("update.moment_ratio")
    assert found.keys() == {1, 2}, "there is no memory before the first step"
    assert found[1]["weight"] == pytest.approx(1.0, rel=1e-4)
    assert found[2]["weight"] == pytest.approx(5.0, rel=1e-4)


def test_decay_is_told_by_parameter_and_kind() -> None:
    module = nn.Linear(3, 2)
    decays = ((module.weight, 0.1), (module.bias, 0.0))
    for kind, coupled in ((torch.optim.AdamW, False), (torch.optim.Adam, True), (torch.optim.SGD, True)):
        (told,) = Driven(module, kind([{"params": [one], "weight_decay": decay} for one, decay in decays], lr=0.1)).probe.facts().optimizers
        assert (told.decayed, told.coupled_decay, told.weight_decay) == (("weight",), coupled, 0.1)
    (told,) = Driven(module, torch.optim.NAdam(module.parameters(), weight_decay=0.1, decoupled_weight_decay=True)).probe.facts().optimizers
    assert (told.decayed, told.coupled_decay) == (("weight", "bias"), False)

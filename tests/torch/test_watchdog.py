"""A run that stands still is told of while it stands; nothing is told of a run that is over or busy elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainvet.callbacks.loop import watch
from trainvet.callbacks.watchdog import Watchdog

STALL: dict[str, dict[str, Any]] = {"stalled-run": {"seconds": 0.5}}


def dogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainvet-watchdog"]


def slow_batches(pauses: dict[int, float], count: int = 6) -> Any:
    for index in range(count):
        time.sleep(pauses.get(index, 0.0))
        yield torch.ones(4, 2) * index


def train(directory: Path, pauses: dict[int, float], **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, log_dir=directory, select=("RN102",), **arguments) as vet:
        for x in slow_batches(pauses):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            vet.step(loss)
            optimizer.step()
    return vet


def test_a_data_loader_that_freezes_is_told_with_the_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vet = train(tmp_path, {3: 1.5}, settings=STALL)
    (found,) = vet.report.findings
    assert (found.code, found.step) == ("RN102", 3)
    assert 0.5 <= found.evidence["seconds"] < 1.5
    assert "slow_batches" in found.evidence["stands at"]
    assert "slow_batches" in Path(str(found.evidence["stacks"])).read_text()
    assert "no step for" in caplog.text
    assert dogs() == []


def test_a_run_that_moves_is_left_alone(tmp_path: Path) -> None:
    vet = train(tmp_path, dict.fromkeys(range(6), 0.1), settings=STALL)
    assert vet.report.findings == ()
    assert list(tmp_path.rglob("stalled-*")) == []


def test_two_stalls_are_two_episodes(tmp_path: Path) -> None:
    vet = train(tmp_path, {1: 0.9, 4: 0.9}, settings=STALL)
    (found,) = vet.report.findings
    assert [item.step for item in (found, *found.consequences)] == [1, 4]


def test_a_stall_at_the_end_is_told_and_the_thread_is_gone_after_an_exception(tmp_path: Path) -> None:
    def stuck(vet: Any) -> None:
        with vet:
            assert len(dogs()) == 1
            time.sleep(0.9)
            raise RuntimeError("enough")

    model = nn.Linear(1, 1)
    vet = watch(model, torch.optim.SGD(model.parameters(), 0.1), log_dir=tmp_path, select=("RN102",), settings=STALL)
    with pytest.raises(RuntimeError, match="enough"):
        stuck(vet)
    assert [item.code for item in vet.report.findings] == ["RN102"]
    assert dogs() == []


def test_nobody_watches_where_the_rule_is_not_selected(tmp_path: Path) -> None:
    with watch(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), log_dir=tmp_path, select=("LO",)):
        assert dogs() == []


def test_calls_of_the_model_for_an_evaluation_are_life(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with watch(model, torch.optim.SGD(model.parameters(), 0.1), log_dir=tmp_path, select=("RN102",), settings=STALL) as vet:
        model.eval()
        for _ in range(10):
            time.sleep(0.12)
            model(torch.ones(1, 2))
    assert vet.report.findings == ()


def test_a_fit_that_broke_off_without_telling_is_no_stall(tmp_path: Path) -> None:
    def fit() -> Watchdog:
        dog = Watchdog(0.3, tmp_path)
        dog.start()
        return dog

    dog = fit()
    time.sleep(0.7)
    assert dog.take() == []
    dog.stop()


def test_a_watchdog_that_nobody_holds_ends() -> None:
    Watchdog(0.2, None).start()
    deadline = time.monotonic() + 3
    while dogs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert dogs() == []

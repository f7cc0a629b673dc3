"""The user asked for an early end, or for bad updates to be dropped: what is saved, what is said, what is left on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from tests.lightning.runs import Net, built, data, finite, fit, half, trainer
from tests.torch.left_behind import left_behind, plain
from tests.torch.runs import Everything
from trainvet.action import TrainingAborted
from trainvet.callbacks.lightning import Diagnostics
from trainvet.finding import Finding, Severity
from trainvet.integrations.tensorboard.reader import read
from trainvet.rule import Rule
from trainvet.statistics import Snapshot
from trainvet.watchpoint import Watchpoint

ONLY = ("NF101",)


class Orthogonal(torch.optim.Optimizer):
    """An optimizer of the user's own, after Muon: matrices move along the nearest orthogonal matrix of their momentum, the rest along its sign."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                matrix = momentum.dim() == 2 and bool(torch.isfinite(momentum).all())
                left, _, right = torch.linalg.svd(momentum, full_matrices=False) if matrix else (momentum.sign(), None, None)
                parameter.sub_(left @ right if matrix else left, alpha=group["lr"])
        return loss


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"optimizer": torch.optim.Adam, "foreach": True},
    "AdamW, one by one": {"optimizer": torch.optim.AdamW, "foreach": False},
    "AdamW, fused": {"optimizer": torch.optim.AdamW, "fused": True},
    "RMSprop": {"optimizer": torch.optim.RMSprop, "momentum": 0.5},
    "Adagrad": {"optimizer": torch.optim.Adagrad},
    "NAdam": {"optimizer": torch.optim.NAdam},
    "one of the user's own": {"optimizer": Orthogonal},
    "L-BFGS": {"optimizer": torch.optim.LBFGS, "lr": 0.1, "max_iter": 2},
}


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return plain({"module": module.state_dict(), "optimizer": optimizer.state_dict()})


class Remembers(Net):
    """Keeps the whole state at the start of every batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.states = [*getattr(self, "states", []), snapshot(self, self.trainer.optimizers[0])]


def aborted(directory: Path, module: Net, diagnostics: Diagnostics, callbacks: Iterable[Any] = (), **arguments: Any) -> tuple[TrainingAborted, Any]:
    run = trainer(directory, [diagnostics, *callbacks], **arguments)
    torch.manual_seed(1)
    with pytest.raises(TrainingAborted) as caught:
        run.fit(module, data())
    assert left_behind(module, run.optimizers) == []
    return caught.value, run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_poisoned_update_reaches_nothing(tmp_path: Path, name: str) -> None:
    module, diagnostics = built(Remembers, poison=[5], **OPTIMIZERS[name]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    error, run = aborted(tmp_path, module, diagnostics)
    assert snapshot(module, run.optimizers[0]) == module.states[5], "weights, buffers, moments and step counts as before the bad batch"
    assert all(finite(module))
    assert module.handed == 6
    assert error.report is not None
    assert (error.report.status, diagnostics.report.status) == ("aborted", "aborted")
    assert diagnostics.report.findings[0].code == "NF101"
    assert diagnostics.report.last_good_step == 4


def test_weights_before_a_bad_step_under_accumulation(tmp_path: Path) -> None:
    """The bad batch is the first of its group: the good one after it must not save the poisoned statistics as good ones."""
    module, diagnostics = built(Remembers, poison=[6]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    _, run = aborted(tmp_path, module, diagnostics, accumulate_grad_batches=2)
    assert snapshot(module, run.optimizers[0]) == module.states[6]
    assert diagnostics.report.findings[0].step == 3
    head = diagnostics.report.findings[0]
    assert (head.where, head.evidence["batch"]) == ("input", 6)
    assert "in the batch: it was made outside all modules, batch 6" in head.message


def test_what_is_said(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module, diagnostics = built(Net, poison=[5]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    error, _ = aborted(tmp_path, module, diagnostics, [keeper], enable_checkpointing=True)
    text = str(error)
    assert text.startswith("NF101 non-finite-value at input, step 5: ")
    assert "Last good step: 4" in text
    assert str(tmp_path / "kept" / "step=4.ckpt") in text
    assert diagnostics.report.reason == text


def test_files_are_complete_and_the_logger_is_closed(tmp_path: Path) -> None:
    class Logger(TensorBoardLogger):
        ended = ""

        def finalize(self, status: str) -> None:
            self.ended = status
            super().finalize(status)

    logger = Logger(tmp_path, name="", version="run")
    module, diagnostics = built(Net, poison=[5]), Diagnostics(select=ONLY, abort_on="error")
    aborted(tmp_path, module, diagnostics, logger=logger)
    assert logger.ended == "failed"
    directory = tmp_path / "run" / "trainvet"
    recorded = read(directory)
    assert [finding.code for finding in recorded.findings] == ["NF101"]
    assert recorded.snapshots[-1].step == 5
    assert recorded.end is not None
    assert (recorded.end.status, recorded.notes) == ("aborted", ())


def test_the_newest_checkpoint_is_finite(tmp_path: Path) -> None:
    """A checkpoint callback that runs after an alarm, and one at every batch, write nothing that is poisoned."""
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last=True)
    module, diagnostics = built(Net, poison=[5]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    error, _ = aborted(tmp_path, module, diagnostics, [keeper], enable_checkpointing=True)
    kept = {path.name: torch.load(path, weights_only=True)["state_dict"] for path in (tmp_path / "kept").glob("*.ckpt")}
    assert sorted(kept) == ["last.ckpt", *(f"step={step}.ckpt" for step in range(1, 6))]
    assert all(bool(torch.isfinite(value).all()) for state in kept.values() for value in state.values())
    assert "step=5.ckpt" in str(error) or "last.ckpt" in str(error)


class Slow(Rule):
    """Finds at step 5 that all was bad from step 2 on."""

    code = "ZZ200"
    severity = Severity.ERROR
    reads = frozenset({"run.gradient_norm"})

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        if snapshot.step == 5:
            yield self.finding(5, "late", first_step=2, subjects=["net.0"])


def test_an_abort_by_another_rule_names_a_checkpoint_from_before_its_fault(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    module, diagnostics = built(Net), Diagnostics(log_dir=tmp_path, select=ONLY, rules=[Slow()], abort_on=["ZZ200"], every=1)
    error, run = aborted(tmp_path, module, diagnostics, [keeper], enable_checkpointing=True)
    assert str(error).startswith("ZZ200 slow at net.0, step 5: late")
    assert run.global_step == 6
    assert "Last good step: 1; last checkpoint from before it: " in str(error)
    assert str(error).endswith("step=2.ckpt")


def test_an_abort_by_the_name_of_a_watchpoint(tmp_path: Path) -> None:
    points = [Watchpoint("run.gradient_norm", above=0.0, name="always"), Watchpoint("loss.value", below=-1.0, name="never")]
    fit(tmp_path, built(Net), [Diagnostics(log_dir=tmp_path / "a", rules=points, abort_on="never")])
    error, _ = aborted(tmp_path, built(Net), Diagnostics(log_dir=tmp_path / "b", rules=points, abort_on="always"))
    assert "always" in str(error)


def test_codes_without_the_nan_rule_hold_nothing(tmp_path: Path) -> None:
    module, diagnostics = (
        built(Net, poison=[5]),
        Diagnostics(log_dir=tmp_path, select=("NF101", "WT104"), abort_on=["WT104"], settings={"WT104": {"warn": 1e9}}),
    )
    fit(tmp_path, module, [diagnostics])
    assert not all(finite(module)), "nobody asked for the update to be held"
    assert diagnostics.report.findings[0].code == "NF101"


def test_a_graceful_stop(tmp_path: Path) -> None:
    module, diagnostics = built(Remembers, poison=[5]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error", abort="stop")
    run = fit(tmp_path, module, [diagnostics])
    assert module.batches == 6
    assert snapshot(module, run.optimizers[0]) == module.states[5]
    assert diagnostics.report.status == "aborted"
    assert diagnostics.report.reason.startswith("NF101 non-finite-value at input, step 5")
    assert left_behind(module, run.optimizers) == []


def test_a_graceful_stop_waits_for_min_steps_and_says_so(tmp_path: Path) -> None:
    module, diagnostics = built(Net, poison=[5, 7]), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error", abort="stop")
    with pytest.warns(UserWarning, match="waits for min_steps"):
        fit(tmp_path, module, [diagnostics], min_steps=10)
    assert module.batches == 10
    assert all(finite(module)), "further bad updates are held as well"
    assert "step 5" in diagnostics.report.reason


def test_strict(tmp_path: Path) -> None:
    module, diagnostics = built(Remembers, poison=[5], fused=True), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error", strict=True)
    _, run = aborted(tmp_path, module, diagnostics)
    assert snapshot(module, run.optimizers[0]) == module.states[5]


# ---- dropping bad updates


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_bad_updates_are_dropped_and_the_third_ends_the_run(tmp_path: Path, name: str) -> None:
    module = built(Remembers, poison=[3, 4, 9], **OPTIMIZERS[name])
    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, rules=[seen := Everything()], skip_bad_updates=2)
    error, run = aborted(tmp_path, module, diagnostics)
    if name != "L-BFGS":  # it counts evaluations
        assert module.states[4] == module.states[5] == module.states[3]
    assert module.states[4]["module"] == module.states[5]["module"] == module.states[3]["module"]
    assert module.states[6] != module.states[5]
    assert [step for step, value in seen.series("run.skipped").items() if value] == [3, 4]
    assert (diagnostics.report.steps, diagnostics.report.applied) == (10, 7)
    assert snapshot(module, run.optimizers[0])["module"] == module.states[9]["module"]
    assert "no more bad updates are allowed" in str(error)
    assert all(finite(module))


def test_dropped_updates_do_not_end_a_run_that_is_to_end_at_errors(tmp_path: Path) -> None:
    module = built(Remembers, poison=[3, 4, 9])
    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error", skip_bad_updates=2)
    error, _ = aborted(tmp_path, module, diagnostics)
    assert module.batches == 10
    assert "step 9" in str(error)


def test_bad_updates_within_what_is_allowed_end_nothing(tmp_path: Path) -> None:
    module = built(Net, poison=[3, 12])
    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, skip_bad_updates=2, every=1)
    run = fit(tmp_path, module, [diagnostics])
    assert run.global_step == 16
    assert all(finite(module))
    assert (diagnostics.report.status, diagnostics.report.applied) == ("finished", 14)
    assert [finding.severity for finding in diagnostics.report.findings] == [Severity.WARNING]


def test_a_loss_scaler_skips_by_itself(tmp_path: Path) -> None:
    module = built(Net, poison=[3, 4, 9, 10])
    diagnostics = Diagnostics(log_dir=tmp_path, skip_bad_updates=1, select=(), every=1)
    run = fit(tmp_path, module, [diagnostics], plugins=[half()])
    assert run.global_step == 16
    assert diagnostics.report.applied == 12


# ---- where it came from


class Faulty(Net):
    """From batch 5 on one module makes NaN out of finite numbers."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_of = LogOf()
        self.seen: list[int] = []
        self.history = {"loss": [0.0]}

    def loss(self, batch: Any) -> Tensor:
        self.seen.append(len(self.seen))
        self.history["loss"].append(1.0)
        y = self.net(batch[0])
        return nn.functional.mse_loss(self.log_of(y, self.batches > 5), batch[1])


class LogOf(nn.Module):
    def forward(self, x: Tensor, broken: bool) -> Tensor:
        return torch.log(-1 - x.abs()) if broken else x


@pytest.mark.parametrize("abort_on", [None, "error"])
def test_the_module_that_made_the_first_nan_is_named(tmp_path: Path, abort_on: str | None) -> None:
    module, diagnostics = built(Faulty), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on=abort_on)
    try:
        fit(tmp_path, module, [diagnostics])
    except TrainingAborted:
        assert abort_on
    head = diagnostics.report.findings[0]
    assert (head.code, head.where, head.step, head.evidence["batch"]) == ("NF101", "log_of", 5, 5)
    assert "made by log_of (LogOf) from finite input in [" in head.message
    assert module.seen == list(range(len(module.losses))), "the replay left no trace"
    assert len(module.history["loss"]) == len(module.losses) + 1
    assert len(module.losses) == module.batches


def test_a_replay_logs_nothing(tmp_path: Path) -> None:
    class Logs(Faulty):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.experiment.add_scalar("mine", 1.0, self.batches)  # type: ignore[union-attr]
            self.log("again", 1.0)
            self.log_dict({"more": 2.0})
            return super().training_step(batch, batch_idx)

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    diagnostics = Diagnostics(log_dir=tmp_path / "vet", select=ONLY)
    fit(tmp_path, built(Logs), [diagnostics], logger=logger, max_epochs=1)
    assert diagnostics.report.findings[0].where == "log_of"
    assert diagnostics.report.errors == ()
    (file,) = (tmp_path / "run").glob("*tfevents*")
    assert file.read_bytes().count(b"mine") == 8


SIGNATURES: dict[str, Any] = {
    "batch": lambda self, batch: Faulty.training_step(self, batch, 0),
    "batch, batch_idx": lambda self, batch, batch_idx: Faulty.training_step(self, batch, batch_idx),
    "batch, another name": lambda self, batch, number: Faulty.training_step(self, batch, number),
    "any number": lambda self, *everything: Faulty.training_step(self, *everything),
    "a dictionary": lambda self, batch, batch_idx: {"loss": Faulty.training_step(self, batch, batch_idx), "extra": None},
    "keyword with a default": lambda self, batch, batch_idx, scale=1.0: Faulty.training_step(self, batch, batch_idx),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_training_step(tmp_path: Path, name: str) -> None:
    kind = type("Signed", (Faulty,), {"training_step": SIGNATURES[name]})
    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    aborted(tmp_path, built(kind), diagnostics)
    assert diagnostics.report.errors == ()
    assert diagnostics.report.findings[0].where == "log_of"


def test_a_replay_draws_the_same_dropout(tmp_path: Path) -> None:
    class Unlucky(Net):
        """NaN only for one mask in many: that of the eighth batch."""

        def loss(self, batch: Any) -> Tensor:
            mask = nn.functional.dropout(torch.ones(64), 0.5)
            self.masks = [*getattr(self, "masks", []), mask]
            y = self.net(batch[0])
            bad = len(self.losses) >= 7 and torch.equal(mask, self.masks[7])
            return nn.functional.mse_loss(self.log_of(y, bad), batch[1])

        def __init__(self) -> None:
            super().__init__()
            self.log_of = LogOf()

    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    aborted(tmp_path, built(Unlucky), diagnostics)
    assert diagnostics.report.findings[0].where == "log_of"


def test_under_manual_optimisation_it_is_said_that_nothing_was_run_again(tmp_path: Path) -> None:
    class Manual(Faulty):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()  # type: ignore[union-attr]

    module, diagnostics = built(Manual), Diagnostics(log_dir=tmp_path, select=ONLY, abort_on="error")
    aborted(tmp_path, module, diagnostics)
    assert "steps the optimizers by itself" in str(diagnostics.report.findings[0].evidence["replay"])
    assert module.batches == 6


def test_a_bad_step_of_the_second_optimizer_comes_after_the_good_one_of_the_first(tmp_path: Path) -> None:
    class Pair(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, network in zip(self.optimizers(), (self.net, self.other), strict=True):  # type: ignore[arg-type]
                optimizer.zero_grad()
                factor = float("nan") if network is self.other and self.batches == 5 else 1.0
                self.manual_backward(nn.functional.mse_loss(network(batch[0]), batch[1]) * factor)
                optimizer.step()
            self.batches += 1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.01), torch.optim.SGD(self.other.parameters(), lr=0.01)

    seen = Everything()
    diagnostics = Diagnostics(log_dir=tmp_path, select=ONLY, rules=[seen], abort_on="error", every=1)
    aborted(tmp_path, built(Pair), diagnostics)
    assert [snapshot.step for snapshot in seen.seen] == list(range(12))
    assert diagnostics.report.findings[0].step == 11
    assert diagnostics.report.applied == 11

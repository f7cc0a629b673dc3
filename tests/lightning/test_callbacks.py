"""The callbacks as objects: several in one run, built from YAML, copied, used again, switched off, given nonsense."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from torch import nn

from tests.lightning.runs import Net, built, data, fit, trainer
from tests.torch.left_behind import everything, left_behind
from tests.torch.runs import Everything
from trainvet.action import TrainingAborted
from trainvet.callbacks import lightning as callbacks
from trainvet.callbacks.lightning import Diagnostics
from trainvet.integrations.torch import host, sampling
from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.probe import Probe
from trainvet.rule import catalogue
from trainvet.watchpoint import Watchpoint

FOCUSED = {
    "LearningRateSanity": ("LR",),
    "LossScaleMonitor": ("LS",),
    "GradientWatch": ("GR", "NF"),
    "WeightWatch": ("WT",),
    "ActivationWatch": ("AC",),
    "DataWatch": ("IN",),
}


def available(prefixes: tuple[str, ...]) -> bool:
    return all(any(code.startswith(prefix) for code in catalogue()) for prefix in prefixes)


# ---- several in one run


def test_a_focused_callback_sees_its_own_rules(tmp_path: Path) -> None:
    names = [name for name, prefixes in FOCUSED.items() if available(prefixes)]
    assert len(names) >= 3
    several = [getattr(callbacks, name)() for name in names]
    several[0] = type(several[0])(log_dir=tmp_path)
    fit(tmp_path, built(Net), several)
    codes = [{item.code for item in callback.report.coverage} for callback in several]
    for name, seen in zip(names, codes, strict=True):
        assert seen, name
        assert all(code.startswith(FOCUSED[name]) for code in seen), name
    assert not set.intersection(*codes)
    assert {callback.report.status for callback in several} == {"finished"}
    assert len({callback.log_dir for callback in several}) == 1
    assert several[-1].history("run.gradient_norm").steps.tolist() == list(range(16))


def test_a_tensor_is_read_once_however_many_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, int] = {}

    def counting(place: Any, name: str) -> None:
        original = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    counting(host, "norms_at_once")
    counting(host, "table")
    counting(sampling.Sampling, "updated")
    counting(Look, "start")
    counts = []
    for number in (1, 3):
        calls.clear()
        points = [Watchpoint(statistic, above=1e30) for statistic in ("gradient.std", "weight.std", "activation.std")]
        fit(tmp_path, built(Net), [Diagnostics(log_dir=tmp_path, select=(), rules=points[index::number], every=4) for index in range(number)])
        counts.append(dict(calls))
    assert counts[0] == counts[1]
    assert counts[0]["norms_at_once"] == 16
    assert counts[0]["updated"] == counts[0]["start"] == 11


def test_findings_go_to_those_who_asked(tmp_path: Path) -> None:
    told: list[str] = []
    first = Diagnostics(
        log_dir=tmp_path, select=(), rules=[Watchpoint("loss.value", above=-1.0, name="one")], on_finding=lambda f: told.append(f.name)
    )
    second = Diagnostics(select=(), rules=[Watchpoint("run.gradient_norm", above=-1.0, name="two")])
    fit(tmp_path, built(Net), [first, second])
    assert sorted(told) == ["one", "two"], "one pager for the run"
    assert [finding.name for finding in first.report.findings] == ["one"]
    assert [finding.name for finding in second.report.findings] == ["two"]


def test_what_one_of_several_asks_for_holds_for_the_run(tmp_path: Path) -> None:
    module = built(Net, poison=[5])
    with pytest.raises(TrainingAborted):
        fit(tmp_path, module, [callbacks.WeightWatch(log_dir=tmp_path), Diagnostics(select=("NF101",), abort_on="error")])
    assert module.handed == 6


@pytest.mark.parametrize(
    "pair", [({"abort_on": "error"}, {"abort_on": "fatal"}), ({"log_dir": "a"}, {"log_dir": "b"}), ({"every": 1}, {"every": 2})], ids=str
)
def test_contradictions_are_one_clear_error_at_the_start(tmp_path: Path, pair: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = built(Net)
    (name,) = pair[0]
    with pytest.raises(ValueError, match=f"contradict each other: {name}="):
        fit(tmp_path, module, [Diagnostics(**pair[0]), callbacks.WeightWatch(**pair[1])])
    assert module.handed == 0
    assert left_behind(module) == []


# ---- objects


def test_built_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        textwrap.dedent(f"""
        trainer:
          max_epochs: 1
          logger: false
          enable_checkpointing: false
          enable_progress_bar: false
          accelerator: cpu
          callbacks:
            - class_path: trainvet.callbacks.lightning.Diagnostics
              init_args:
                log_dir: {tmp_path / "vet"}
                select: [NF, WT]
                settings: {{WT104: {{warn: 0.5}}}}
                rules:
                  - class_path: trainvet.watchpoint.Watchpoint
                    init_args: {{statistic: gradient.abs_max, above: 100.0, severity: error}}
                every: 4
                abort_on: error
                expect: {{val_acc: 0.9}}
            - class_path: trainvet.callbacks.lightning.ActivationWatch
            - class_path: trainvet.callbacks.lightning.GradientWatch
              init_args: {{abort_on: null, every: auto}}
        """)
    )
    cli = LightningCLI(Plain, Numbers, args=["fit", "--config", str(tmp_path / "config.yaml")], save_config_callback=None)
    ours = [callback for callback in cli.trainer.callbacks if isinstance(callback, Diagnostics)]
    assert [type(callback).__name__ for callback in ours] == ["Diagnostics", "ActivationWatch", "GradientWatch"]
    assert ours[0].report.status == "finished"
    assert ours[0].report.errors == ()
    assert {item.code for item in ours[0].report.coverage} >= {"NF101", "WT104"}
    assert ours[0].history("gradient.abs_max").steps[-1] > 4


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Numbers(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return data(12)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))], ids=["deepcopy", "pickle"])
def test_copies_carry_arguments_report_and_histories(tmp_path: Path, how: Any) -> None:
    original = Diagnostics(log_dir=tmp_path / "a", select=("NF", "WT"), every=3, expect={"val_acc": 0.5})
    before = how(original)
    fit(tmp_path, built(Net), [original])
    after = how(original)
    assert after.report.to_dict() == original.report.to_dict()
    assert after.log_dir is None
    assert after.state_key == before.state_key == original.state_key
    for fresh in (before, after):
        run = fit(tmp_path, module := built(Net), [fresh])
        assert fresh.report.status == "finished"
        assert (fresh.report.steps, fresh.report.errors) == (16, ())
        assert left_behind(module, run.optimizers) == []


def test_a_run_under_way_can_be_copied(tmp_path: Path) -> None:
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                copied.append(copy.deepcopy(module))
                pickle.dumps([callback for callback in trainer.callbacks if isinstance(callback, Diagnostics)])
                torch.save(module.state_dict(), tmp_path / "weights.pt")

    copied: list[nn.Module] = []
    fit(tmp_path, built(Net), [Diagnostics(log_dir=tmp_path, every=1), Copies()])
    assert left_behind(copied[0]) == []


def test_one_callback_in_several_runs(tmp_path: Path) -> None:
    diagnostics = Diagnostics(log_dir=tmp_path, select=("NF", "WT"), rules=[seen := Everything()])
    for poison in ([5], []):
        run = fit(tmp_path, module := built(Net, poison=poison), [diagnostics])
        assert bool(diagnostics.report.findings) == bool(poison), "the second run knows nothing of the first"
        assert diagnostics.report.steps == 16
        assert left_behind(module, run.optimizers) == []
    assert len({id(plan) for plan in seen.plans}) > 2
    run = trainer(tmp_path, [diagnostics], max_epochs=1)
    module = built(Net)
    run.fit(module, data())
    run.fit_loop.max_epochs = 3
    run.fit(module, data())
    assert diagnostics.report.steps == run.global_step == 24
    assert diagnostics.history("loss.value").steps.tolist() == list(range(8, 24))
    assert diagnostics.report.errors == ()


def test_after_fit_the_same_trainer_may_test(tmp_path: Path) -> None:
    class Tests(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))

    diagnostics = Diagnostics(log_dir=tmp_path)
    module = built(Tests)
    run = fit(tmp_path, module, [diagnostics])
    report = diagnostics.report
    run.test(module, data(2), verbose=False)
    run.validate(module, data(2), verbose=False)
    after, before = diagnostics.report.to_dict(), report.to_dict()
    coverage = [[item for item in told.pop("coverage") if item["code"] != "MO110"] for told in (after, before)]
    assert after == before
    assert coverage[0] == coverage[1], "only the rule about the weights under test has seen something"


def test_fast_dev_run(tmp_path: Path) -> None:
    diagnostics = Diagnostics(log_dir=tmp_path)
    fit(tmp_path, built(Net), [diagnostics], fast_dev_run=2)
    assert diagnostics.report.steps == 2
    assert diagnostics.report.errors == ()


def test_a_learning_rate_finder_is_not_watched(tmp_path: Path) -> None:
    class Tuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    diagnostics = Diagnostics(log_dir=tmp_path, select=("NF",), rules=[seen := Everything()], abort_on="error")
    fit(tmp_path, built(Tuned), [diagnostics, LearningRateFinder(num_training_steps=12, max_lr=1e30)], loader=data(16))
    assert sorted(seen.series("loss.value")) == list(range(32))
    assert diagnostics.report.status == "finished"


# ---- where files go


def test_files_go_to_the_loggers_directory(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    for logger in (TensorBoardLogger(tmp_path, name="a", version="1"), CSVLogger(tmp_path, name="b", version="2")):
        diagnostics = Diagnostics()
        fit(tmp_path, built(Net), [diagnostics], logger=logger)
        assert diagnostics.log_dir == Path(logger.log_dir) / "trainvet"
        assert list(diagnostics.log_dir.glob("*tfevents*"))


def test_without_a_logger_files_go_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnostics = Diagnostics()
    fit(tmp_path, built(Net), [diagnostics])
    assert diagnostics.log_dir is not None
    assert diagnostics.log_dir.parts[0] == "runs"


def test_a_given_directory_that_cannot_be_written_is_an_error_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"log_dir '.*file/below' cannot be written"):
        Diagnostics(log_dir=tmp_path / "file" / "below")


def test_a_default_directory_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file stands where the directory would be")
    diagnostics = Diagnostics(select=("NF101",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, built(Net), [diagnostics])
    assert sum("trainvet writes no files" in str(warning.message) for warning in caught) == 1
    assert diagnostics.log_dir is None
    assert diagnostics.report.status == "finished"
    assert diagnostics.history("loss.value").steps.tolist() == list(range(16))


# ---- nonsense


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"select": ["dead-rely"]}, "unknown rule 'dead-rely'; did you mean dead-relu"),
        ({"ignore": ["WT1O4"]}, "did you mean WT104"),
        ({"select": "GR"}, 'must be a sequence of names, such as \\("GR",\\)'),
        ({"settings": {"dead-relu": {"shere": 0.5}}}, "did you mean share"),
        ({"settings": {"WT104": {"warn": -1.0}}}, "must be a finite number of at least 0"),
        ({"settings": {"WT104": {"warn": "much"}}}, "same kind"),
        ({"rules": ["WT104"]}, "must be Rule or Watchpoint objects"),
        ({"every": 0}, 'must be "auto" or a whole number'),
        ({"every": "often"}, 'must be "auto" or a whole number'),
        ({"profile": "gann"}, "unknown profile 'gann'; one of gan"),
        ({"abort_on": "eror"}, "unknown rule 'eror'"),
        ({"abort": "kill"}, 'must be "raise" or "stop"'),
        ({"skip_bad_updates": -1}, "must be a whole number of at least 0"),
        ({"on_finding": "mail"}, "must be callable"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_clear_error_at_construction(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        Diagnostics(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0}], ids=str)
def test_a_trainer_without_steps_is_one_clear_sentence(tmp_path: Path, arguments: dict[str, Any]) -> None:
    several = [Diagnostics(log_dir=tmp_path), callbacks.WeightWatch()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, built(Net), several, **arguments)
    sentence = "the trainer ran no training step, so nothing was watched"
    assert [str(warning.message) for warning in caught if "trainvet" in str(warning.message)] == [f"trainvet: {sentence}"]
    assert [callback.report.reason for callback in several] == [sentence] * 2


def test_a_module_without_an_optimizer_trains_on(tmp_path: Path) -> None:
    class Idle(Net):
        def configure_optimizers(self) -> None:
            return None

    diagnostics = Diagnostics(log_dir=tmp_path)
    fit(tmp_path, built(Idle), [diagnostics])
    assert diagnostics.report.errors == ()


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINVET", "off")
    module, diagnostics = built(Net, poison=[5]), Diagnostics(log_dir=tmp_path / "vet", abort_on="error", every=1)
    run = fit(tmp_path, module, [diagnostics])
    assert run.global_step == 16
    assert list((tmp_path / "vet").iterdir()) == []
    assert diagnostics.report.steps == 0


# ---- errors of ours


@pytest.mark.parametrize("method", ["__init__", "forward", "loss", "gradients", "updated", "poll", "facts", "close"])
def test_an_error_of_ours_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    bare = built(Net)
    run = fit(tmp_path, bare)
    expected = everything(bare, run.optimizers)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("ours")

    original = getattr(Probe, method)
    calls: list[int] = []

    def later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs) if method not in ("__init__", "facts", "close") and len(calls) < 4 else fails()

    monkeypatch.setattr(Probe, method, later)
    module, diagnostics = built(Net), Diagnostics(log_dir=tmp_path, every=1)
    run = fit(tmp_path, module, [diagnostics])
    assert everything(module, run.optimizers) == expected
    assert left_behind(module, run.optimizers) == []
    (error,) = diagnostics.report.errors
    assert "Traceback" in error
    assert "ZeroDivisionError: ours" in error
    assert diagnostics.report.status == "finished"


@pytest.mark.parametrize("kernel", ["table", "norms", "update_columns"])
def test_an_error_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(host, kernel, fails)
    module, diagnostics = built(Net), Diagnostics(log_dir=tmp_path, every=1)
    run = fit(tmp_path, module, [diagnostics])
    assert run.global_step == 16
    assert left_behind(module, run.optimizers) == []
    assert len(diagnostics.report.errors) == 1


def test_a_directory_that_vanishes_during_the_run_switches_off_the_files_only(tmp_path: Path) -> None:
    class Vanishes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                for file in (tmp_path / "vet" / "trainvet").iterdir():
                    file.unlink()
                (tmp_path / "vet" / "trainvet").rmdir()
                (tmp_path / "vet" / "trainvet").write_text("")

    diagnostics = Diagnostics(log_dir=tmp_path / "vet", every=1)
    run = fit(tmp_path, built(Net), [diagnostics, Vanishes()])
    assert run.global_step == 16
    assert diagnostics.report.steps == 16
    assert diagnostics.report.status == "finished"


# ---- the other package


def test_pytorch_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    program = """
        import sys
        import pytorch_lightning as pl, torch
        from torch import nn
        from trainvet.callbacks.lightning import Diagnostics

        class Plain(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 1)
            def training_step(self, batch, batch_idx):
                y = self.layer(batch[0])
                return nn.functional.mse_loss((-1 - y.abs()).log() if self.global_step == 5 else y, batch[1])
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

        x = torch.randn(64, 8)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4)
        vet = Diagnostics(log_dir=sys.argv[1], select=["NF101"], abort_on="error")
        trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[vet], accelerator="cpu")
        assert isinstance(vet, pl.Callback)
        try:
            trainer.fit(Plain(), loader)
        except RuntimeError as error:
            print(type(error).__name__, vet.report.status, vet.report.findings[0].where, vet.report.errors)
        assert "lightning.pytorch" not in sys.modules
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1:] == ["TrainingAborted aborted loss ()"], result.stderr

"""Other tools on a sample of the same programs: ``python -m benchmarks.detection.peers [--python ormas-monitor=/path/to/python …]``.

Each peer is used as its own documentation shows, at its defaults; what it says on a healthy run is a false alarm, what it says on a faulty one counts
as found whatever it says. ``--python`` names an interpreter for a peer that lives in an environment of its own. A peer that cannot be imported, or
cannot be used on a program it has not seen, is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.detection.run import Job, build
from benchmarks.detection.score import Share
from benchmarks.detection.table import environment

TORCH = (
    *(("mlp-digits", name) for name in ("", "rate-too-high", "rate-too-low", "missing-value-in-one-row", "weight-that-is-not-a-number")),
    *(("mlp-digits", name) for name in ("softmax-twice", "labels-shuffled", "gradients-never-cleared")),
    *(("mlp-wine-tanh", name) for name in ("", "zero-initialisation", "loss-with-the-wrong-sign")),
    *(("mlp-diabetes", name) for name in ("", "unscaled-targets")),
    *((name, "") for name in ("siamese-digits", "lora-digits")),
)
KERAS = (
    *(("mlp-digits", name) for name in ("", "rate-too-high", "rate-too-low", "missing-value-in-one-row", "zero-initialisation", "labels-shuffled")),
    *(("wine-tanh", name) for name in ("", "loss-with-the-wrong-sign")),
    ("diabetes", ""),
)
NOT_RUN = {
    "traincheck 0.2.0": "it installs, but checks a run against invariants inferred from traced reference runs of the same script, "
    "and brings none that an unseen program could be checked with",
    "Lightning's LearningRateMonitor, DeviceStatsMonitor": "they record and judge nothing",
}


class Peer:
    """What stands in a loop where trainvet's ``watch`` would; ``said`` collects alarms."""

    def __init__(self, model: Any, optimizers: list[Any]) -> None:
        self.model, self.optimizer, self.said, self.count = model, optimizers[0], [], 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: Any, optimizer: Any) -> None:
        self.count += 1

    def close(self) -> None:
        """The run is over."""


class Trainvet(Peer):
    """trainvet, for comparison: any headline that is at least a warning."""

    def __init__(self, model: Any, optimizers: list[Any]) -> None:
        super().__init__(model, optimizers)
        from trainvet.callbacks.loop import watch

        self.vet = watch(model, optimizers, log_dir=tempfile.mkdtemp())
        self.vet.__enter__()

    def step(self, loss: Any, optimizer: Any) -> None:
        self.vet.step(loss, optimizer)

    def close(self) -> None:
        self.vet.__exit__(None, None, None)
        self.said += [f"{head.code} {head.name}" for head in self.vet.report.findings if head.severity >= 20]


class Ormas(Peer):
    """ormas-monitor: its events, but for those that describe the run."""

    SILENT = ("structure", "manifest", "alarm_cleared", "loss_recovered", "channels_cleared", "certificate_refused", "skipped_step", "loss_reduced")

    def __init__(self, model: Any, optimizers: list[Any]) -> None:
        super().__init__(model, optimizers)
        from ormas_monitor import Monitor

        self.monitor = Monitor(model, self.optimizer, out=tempfile.mkdtemp(), overwrite=True, verbose=False)
        event = self.monitor._event

        def heard(kind: str, step: int, message: str | None = None, **fields: Any) -> None:
            if kind not in self.SILENT and message:
                self.said.append(f"{kind}: {message}")
            event(kind, step, message, **fields)

        self.monitor._event = heard

    def step(self, loss: Any, optimizer: Any) -> None:
        self.monitor.step(loss)

    def close(self) -> None:
        self.monitor.close(report=False)


class Traintools(Peer):
    """traintools' gradient-health monitor: its warnings."""

    def __init__(self, model: Any, optimizers: list[Any]) -> None:
        super().__init__(model, optimizers)
        from traintools import GradientHealthMonitor

        self.monitor = GradientHealthMonitor()

    def step(self, loss: Any, optimizer: Any) -> None:
        super().step(loss, optimizer)
        self.said += self.monitor.inspect(self.model, step=self.count, lr=optimizer.param_groups[0]["lr"]).warnings


class Underflow(Peer):
    """transformers' DebugUnderflowOverflow: it raises on NaN and Inf."""

    def __init__(self, model: Any, optimizers: list[Any]) -> None:
        super().__init__(model, optimizers)
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(model)


class Anomaly(Peer):
    """torch.autograd.detect_anomaly: it raises on NaN in a backward pass."""

    def __enter__(self) -> Peer:
        import torch

        torch.autograd.set_detect_anomaly(True)
        return self


LOOPS: dict[str, tuple[str, Callable[..., Peer]]] = {
    "trainvet": ("trainvet", Trainvet),
    "ormas-monitor": ("ormas_monitor", Ormas),
    "traintools GradientHealthMonitor": ("traintools", Traintools),
    "transformers DebugUnderflowOverflow": ("transformers", Underflow),
    "torch detect_anomaly": ("torch", Anomaly),
}


def in_torch_loop(name: str, setup: Any) -> list[str]:
    """What a peer says in a hand-written loop."""
    from benchmarks.detection.train_torch import in_loop

    heard: list[Peer] = []

    def watcher(model: Any, optimizers: list[Any]) -> Peer:
        heard.append(LOOPS[name][1](model, optimizers))
        return heard[0]

    try:
        for _ in in_loop(setup, None, watcher):
            pass
    except Exception as error:
        return [*heard[0].said, f"raised {type(error).__name__}: {error}"[:200]]
    return heard[0].said


def early_stopping(name: str, setup: Any) -> list[str]:
    """Lightning's EarlyStopping(check_finite=True): only a stop because of a value that is not finite counts."""
    from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback

    from benchmarks.detection.train_torch import in_lightning

    stopper = EarlyStopping("val_loss", patience=1000, check_finite=True)
    begun: list[int] = []  # stopped_epoch is 0 both after a stop in the first epoch and without one
    counter = LambdaCallback(on_train_epoch_start=lambda trainer, module: begun.append(trainer.current_epoch))
    for _ in in_lightning(setup, None, (stopper, counter)):
        pass
    return [f"stopped in epoch {begun[-1]}"] if len(begun) < setup.epochs else []


def in_keras(name: str, setup: Any) -> list[str]:
    """Keras' TerminateOnNaN, or trainvet."""
    import keras

    from benchmarks.detection.train_keras import fit

    if name == "trainvet (Keras)":
        from trainvet.callbacks.keras import Diagnostics

        diagnostics = Diagnostics(log_dir=tempfile.mkdtemp())
        fit(setup, [diagnostics])
        return [f"{head.code} {head.name}" for head in diagnostics.report.findings if head.severity >= 20]
    fit(setup, [keras.callbacks.TerminateOnNaN()])
    return ["stopped"] if setup.model.stop_training else []


PEERS: dict[str, tuple[str, Callable[[str, Any], list[str]]]] = {
    **dict.fromkeys(LOOPS, ("loop", in_torch_loop)),
    "Lightning EarlyStopping(check_finite)": ("lightning", early_stopping),
    "trainvet (Keras)": ("keras", in_keras),
    "Keras TerminateOnNaN": ("keras", in_keras),
}


def hear(name: str, path: Path) -> None:
    """In the peer's own interpreter: every program of the sample in a forked process; lines of JSON."""
    from benchmarks.detection import operators

    framework, listen = PEERS[name]
    side = "keras" if framework == "keras" else "torch"
    if name in LOOPS:
        __import__(LOOPS[name][0])
    operators.of(side)
    for recipe, fault in KERAS if side == "keras" else TORCH:
        process = os.fork()
        if process == 0:
            job, said, row = Job(framework, recipe, fault, 0), [], {}
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                try:
                    setup = build(job)
                    if fault:
                        operators.of(side)[fault].put(setup)
                    said = listen(name, setup)
                except Exception as error:
                    row = {"failed": f"{type(error).__name__}: {error}"[:300]}
            row = {"recipe": recipe, "fault": fault, "alarms": len(said), "first": said[:1], **row}
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            os._exit(0)
        os.waitpid(process, 0)


def main() -> None:
    """Run all peers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="the interpreter of a peer")
    parser.add_argument("--hear", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of peers.md and peers.json")
    options = parser.parse_args()
    if options.hear:
        hear(options.hear[0], Path(options.hear[1]))
        return
    interpreters = dict(item.split("=", 1) for item in options.python)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in PEERS:
        results[name] = heard_from(name, interpreters.get(name.split()[0], sys.executable))
        (options.out / "peers.json").write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n", encoding="utf-8")
        (options.out / "peers.md").write_text(markdown(results), encoding="utf-8")  # after each peer: what is there stays if the next one hangs
        print(line(name, results[name]), flush=True)


def heard_from(name: str, python: str) -> Any:
    """A peer's rows from an interpreter of its own, or why there are none."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        one_thread = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
        command = [python, "-m", "benchmarks.detection.peers", "--hear", name, str(path)]
        done = subprocess.run(command, env={**os.environ, **one_thread}, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return rows or {"not run": (done.stderr.strip().splitlines() or ["no output"])[-1]}


def line(name: str, rows: Any) -> str:
    """A line of the table."""
    if isinstance(rows, dict):
        return f"| {name} | not run | not run | {rows['not run']} |"
    failed, heard = ([row for row in rows if ("failed" in row) == wanted] for wanted in (True, False))
    healthy, faulty = ([row for row in heard if bool(row["fault"]) == wanted] for wanted in (False, True))
    first = next((f"{row['fault']}: {row['first'][0]}" for row in faulty if row["first"]), "nothing")
    shares = [Share(sum(row["alarms"] > 0 for row in part), len(part)) for part in (healthy, faulty)]
    note = f"; {len(failed)} programs failed: {failed[0]['failed']}" if failed else ""
    return f"| {name} | {shares[0]} | {shares[1]} | {first[:140].replace('|', '/')}{note} |"


def markdown(results: dict[str, Any]) -> str:
    """The table, with the programs on which it is based."""
    programs = {"PyTorch": TORCH, "Keras": KERAS}
    lines = [
        "# Other tools on a sample of the same programs",
        "",
        "`python -m benchmarks.detection.peers`, seed 0. An alarm is anything a tool says,",
    ]
    lines += ["on a faulty run it counts even if it is about something else.", ""]
    lines += [f"- {side}: " + ", ".join(f"{recipe} {fault or '(healthy)'}" for recipe, fault in chosen) for side, chosen in programs.items()]
    lines += ["", "| tool | healthy runs with an alarm | faulty runs with an alarm | what it says first |", "| --- | --- | --- | --- |"]
    lines += [line(name, rows) for name, rows in results.items()]
    lines += [f"| {name} | not run | not run | {reason} |" for name, reason in NOT_RUN.items()]
    lines += ["", ", ".join(f"{name} {number}" for name, number in environment().items()) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""Runs jobs in forked processes that share one import of a framework. ``python -m benchmarks.detection.run SIDE JOBS RESULTS N SECONDS``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# what every run would load for itself
WARM = {
    "torch": ("sklearn.datasets", "torch._dynamo", "trainvet.callbacks.loop", "trainvet.callbacks.lightning"),
    "keras": ("sklearn.datasets", "trainvet.callbacks.keras"),
}
LIMIT = 300  # seconds for one run, with the run that tries its fix


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: a recipe, healthy (``operator`` "") or with a fault."""

    framework: str
    recipe: str
    operator: str
    seed: int

    @property
    def side(self) -> str:
        """The process it belongs to."""
        return "keras" if self.framework == "keras" else "torch"


def recipes(side: str) -> dict[str, Any]:
    """All recipes of a side. Imports the framework."""
    names = ("recipes_keras",) if side == "keras" else ("recipes_torch", "recipes_torch_structures", "recipes_torch_others")
    return {name: recipe for module in names for name, recipe in importlib.import_module(f"benchmarks.detection.{module}").BOOK.items()}


def side_of(setup: Any) -> str:
    """Which framework's model is it?"""
    return "keras" if hasattr(setup.model, "_flatten_layers") else "torch"


def build(job: Job) -> Any:
    """The setup of a job's recipe, without a fault."""
    importlib.import_module(f"benchmarks.detection.train_{job.side}").seed_all(job.seed)
    return recipes(job.side)[job.recipe].build(job.seed)


def one(job: Job, twin: float | None = None) -> dict[str, Any]:
    """Train, and tell what was found; a faulty run is trained once more with the first advice followed.

    ``twin``: the score of the healthy twin, if it is known. A fault that did no harm is not trained again: there is nothing to win back.
    """
    from benchmarks.detection import fixes, operators
    from benchmarks.detection.harm import harmed

    trainer = importlib.import_module(f"benchmarks.detection.train_{job.side}")
    row: dict[str, Any] = dataclasses.asdict(job)
    setup = build(job)
    row["learnt"] = setup.learnt
    fault = operators.of(job.side)[job.operator] if job.operator else None
    if fault is not None:
        if not fault.applies(setup):
            return {**row, "skipped": "does not apply"}
        fault.put(setup)
        row["right"], row["structural"] = sorted(fault.codes), fault.structural
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report, crash = trainer.train(setup, job.framework, Path(directory))
    row.update(seconds=round(time.monotonic() - started, 2), steps=report.steps, crash=crash, errors=list(report.errors), score=score(trainer, setup))
    row["findings"] = [
        {**brief(finding), "consequences": [brief(item) for item in finding.consequences]} for finding in report.findings
    ]  # fmt: skip
    if fault is not None:
        row["onset"] = fault.onset(setup)
        for finding in row["findings"]:
            finding["place"] = fault.placed(setup, finding)
        if twin is None or crash or harmed(math.nan if row["score"] is None else row["score"], twin):
            row.update(fixes.tried(job, fault, report.findings, trainer))
    return row


def brief(finding: Any) -> dict[str, Any]:
    """What is kept of a finding."""
    kept = finding.to_dict()
    names = ("code", "severity", "step", "first_step", "where", "subjects", "message", "evidence", "causes", "fixes")
    return {name: kept[name][:20] if isinstance(kept[name], list) else kept[name] for name in names}


def score(trainer: Any, setup: Any) -> float | None:
    """The held-out score; None where there is none, as after a crash or of weights that are not finite."""
    from benchmarks.detection.harm import performance

    try:
        value = performance(setup, trainer.predict(setup, setup.val_x))
    except Exception:
        return None
    return value if value == value else None


def child(job: Job, path: Path, twin: float | None) -> None:
    """In the forked process: write the row, or why there is none."""
    signal.alarm(LIMIT)
    if job.side == "keras":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    else:
        import torch

        torch.set_num_threads(1)
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        try:
            row = one(job, twin)
        except Exception:
            row = {**dataclasses.asdict(job), "skipped": traceback.format_exc()[-2000:]}
    path.write_text(json.dumps(row, default=str), encoding="utf-8")


def known(results: Path) -> list[dict[str, Any]]:
    """The rows that are there already, as of a run that was interrupted; a last line cut short is none."""
    rows = []
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def work(jobs: Sequence[Job], results: Path, at_once: int, seconds: float) -> None:
    """Run all jobs of which ``results`` has no row, at most ``at_once`` together, and append a line for each. After ``seconds`` no run is started."""
    until = time.monotonic() + seconds
    done = known(results)
    twins = {(row["framework"], row["recipe"], row["seed"]): row.get("score") for row in done if not row["operator"]}
    named = {(row["framework"], row["recipe"], row["operator"], row["seed"]) for row in done}
    waiting = [job for job in jobs if dataclasses.astuple(job) not in named]
    if not waiting:
        return
    recipes(waiting[0].side)
    if any(job.operator for job in waiting):
        importlib.import_module("benchmarks.detection.operators").of(waiting[0].side)
    for name in WARM[waiting[0].side]:
        importlib.import_module(name)
    running: dict[int, tuple[Job, Path]] = {}
    with tempfile.TemporaryDirectory() as directory, results.open("a", encoding="utf-8") as out:
        while (waiting and time.monotonic() < until) or running:
            if waiting and time.monotonic() < until and len(running) < at_once:
                job = waiting.pop(0)
                path = Path(directory) / f"{len(waiting)}.json"
                sys.stdout.flush()
                process = os.fork()
                if process == 0:
                    try:
                        child(job, path, twins.get((job.framework, job.recipe, job.seed)))
                    finally:
                        os._exit(0)
                running[process] = (job, path)
                continue
            process, status = os.wait()
            job, path = running.pop(process)
            broken = {**dataclasses.asdict(job), "skipped": f"no result, exit status {status} (14: over {LIMIT} s)"}
            line = path.read_text(encoding="utf-8") if path.exists() else json.dumps(broken)
            out.write(line + "\n")
            out.flush()
            if not job.operator:
                twins[job.framework, job.recipe, job.seed] = json.loads(line).get("score")
            print(f"{len(waiting)} waiting;", job.framework, job.recipe, job.operator, job.seed, flush=True)


def planned(side: str) -> dict[str, Any]:
    """Which frameworks each recipe is for, and which faults apply to it."""
    from benchmarks.detection import operators

    made = {}
    for name, recipe in recipes(side).items():
        faults = operators.of(side)
        setup = build(Job(recipe.frameworks[0], name, "", 0))
        fitting = [fault.name for fault in faults.values() if fault.applies(setup)]
        made[name] = {"frameworks": recipe.frameworks, "origin": recipe.origin, "faults": fitting}
    return made


def main() -> None:
    """The process of one side."""
    if sys.argv[2] == "--plan":
        Path(sys.argv[3]).write_text(json.dumps(planned(sys.argv[1])), encoding="utf-8")
        return
    side, jobs, results, at_once, seconds = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    read = [Job(**json.loads(line)) for line in jobs.read_text(encoding="utf-8").splitlines()]
    work([job for job in read if job.side == side], results, at_once, seconds)


if __name__ == "__main__":
    main()

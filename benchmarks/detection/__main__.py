"""How often trainvet is right, in one command: ``python -m benchmarks.detection [--quick]``.

Healthy recipes are trained with every seed; each fault is put into a few of the recipes it applies to. Results go to ``results.json`` and
``results.md`` beside this file, or to ``--out``. ``--quick`` is a short fixed selection that fails on a false alarm or on too many misses.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.detection.run import Job
from benchmarks.detection.run import known as known_rows
from benchmarks.detection.score import summary
from benchmarks.detection.table import markdown, results

HERE = Path(__file__).parent
FRAMEWORKS = ("lightning", "loop", "keras")
QUICK = {
    "torch": (
        ("lightning", "mlp-digits", ("", "rate-too-high", "rate-too-low", "missing-from-the-optimizer", "softmax-twice", "missing-value-in-one-row")),
        ("loop", "mlp-wine-tanh", ("", "zero-initialisation", "detached-branch", "momentum-too-high")),
        ("loop", "cnn-digits", ("",)),
        ("lightning", "gpt-characters", ("",)),
        ("loop", "lora-digits", ("",)),
    ),
    "keras": (
        ("keras", "mlp-digits", ("", "rate-too-high", "zero-initialisation", "missing-value-in-one-row")),
        ("keras", "wine-tanh", ("", "rate-too-low")),
        ("keras", "cnn-digits", ("",)),
    ),
}
LEAST = 0.8  # of the faults of --quick must be diagnosed
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "KERAS_BACKEND": "tensorflow",
}


def side_of(framework: str) -> str:
    """The process in which a framework runs."""
    return "keras" if framework == "keras" else "torch"


def run(side: str, *arguments: str) -> None:
    """A process of one side."""
    subprocess.run([sys.executable, "-m", "benchmarks.detection.run", side, *arguments], env={**os.environ, **ENVIRONMENT}, check=False)


def plan(side: str) -> dict[str, dict[str, Any]]:
    """Recipes of a side, with their frameworks and the faults that apply."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        run(side, "--plan", str(path))
        return dict(json.loads(path.read_text(encoding="utf-8")))


def draw(operator: str, framework: str, recipe: str) -> str:
    """An order of recipes that is the same on every machine and another one for each fault."""
    return hashlib.sha256(f"{operator} {framework} {recipe}".encode()).hexdigest()


def choose(
    known: dict[str, dict[str, Any]],
    frameworks: list[str],
    seeds: list[int],
    each: int,
    healthy_only: bool,
    alternate: bool,
    slow: str = "",
) -> list[Job]:
    """Every recipe healthy with every seed; each fault in ``each`` of the recipes it applies to, with changing seeds.

    With ``alternate`` a recipe meets one framework per seed, the next seed the next one. All faults are put into one recipe before any is put into
    two, so that a run that ends early has seen all of them. No fault is put into recipes whose name holds the regular expression ``slow``.
    """

    def trained_in(recipe: str, number: int, seed: int) -> list[str]:
        fitting = [name for name in frameworks if name in known[recipe]["frameworks"]]
        return [fitting[(number + seed) % len(fitting)]] if alternate and fitting else fitting

    jobs = [Job(name, recipe, "", seed) for seed in seeds for number, recipe in enumerate(known) for name in trained_in(recipe, number, seed)]
    if healthy_only:
        return jobs
    faulty: list[tuple[int, Job]] = []
    for fault in dict.fromkeys(fault for facts in known.values() for fault in facts["faults"]):
        fitting = [job for job in jobs if fault in known[job.recipe]["faults"] and not (slow and re.search(slow, job.recipe))]
        for group in [fitting] if alternate else [[job for job in fitting if job.framework == name] for name in frameworks]:
            order = sorted({job.recipe for job in group}, key=lambda recipe: draw(fault, group[0].framework, recipe))
            for number in range(each if order else 0):
                turn, recipe = divmod(number, len(order))
                runs = [job for job in group if job.recipe == order[recipe]]
                if turn < len(runs):
                    faulty.append((number, dataclasses.replace(runs[(recipe + turn) % len(runs)], operator=fault)))
    return spread(jobs, [job for _, job in sorted(faulty, key=lambda pair: pair[0])])


def spread(healthy: list[Job], faulty: list[Job]) -> list[Job]:
    """Both in even shares, so that a run that ends early has some of each; a fault's healthy twin comes before it."""
    places = [(number / len(part), job) for part in (healthy, faulty) for number, job in enumerate(part)]
    ordered = [job for _, job in sorted(places, key=lambda place: place[0])]
    return list(dict.fromkeys(item for job in ordered for item in (dataclasses.replace(job, operator=""), job)))


def execute(jobs: list[Job], at_once: int, kept: Path | None, seconds: float) -> list[dict[str, Any]]:
    """Run all jobs, side by side; returns their rows. ``kept``: a file of rows that is added to."""
    with tempfile.TemporaryDirectory() as directory:
        out = kept or Path(directory) / "rows"
        until = time.monotonic() + seconds
        for side in dict.fromkeys(job.side for job in jobs):
            listed = Path(directory) / f"{side}.jobs"
            listed.write_text("".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs if job.side == side), encoding="utf-8")
            run(side, str(listed), str(out), str(at_once), str(max(0.0, until - time.monotonic())))
        wanted = {dataclasses.astuple(job) for job in jobs}
        return [row for row in known_rows(out) if (row["framework"], row["recipe"], row["operator"], row["seed"]) in wanted]


def main() -> int:
    """Choose, run, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fixed handful in under 3 minutes; fails on a false alarm or too many misses")
    parser.add_argument("--only", default="", metavar="PATTERN", help='only runs whose "framework recipe fault" holds this regular expression')
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--each", type=int, default=4, help="how many recipes each fault is put into, per framework")
    parser.add_argument("--healthy", action="store_true", help="no faults")
    parser.add_argument("--alternate", action="store_true", help="a recipe is trained in Lightning with one seed, in a loop with the next")
    parser.add_argument("--rows", type=Path, default=None, help="a file that keeps each run's row; what is in it is not run again")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this; 0 only writes what --rows holds")
    parser.add_argument("--slow", default="", metavar="PATTERN", help="put no fault into recipes whose name holds this regular expression")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--out", type=Path, default=None, help="folder of results.json and results.md")
    options = parser.parse_args()
    sides = dict.fromkeys(map(side_of, options.framework))
    if options.quick:
        chosen = [part for side in sides for part in QUICK[side] if part[0] in options.framework]
        jobs = [Job(framework, recipe, fault, 0) for framework, recipe, faults in chosen for fault in faults]
    else:
        jobs = []
        for side in sides:
            frameworks = [name for name in options.framework if side_of(name) == side]
            jobs += choose(plan(side), frameworks, options.seeds, options.each, options.healthy, options.alternate, options.slow)
    matching = [job for job in jobs if re.search(options.only, f"{job.framework} {job.recipe} {job.operator}")]
    wanted = {(job.framework, job.recipe, job.seed) for job in matching}
    jobs = [job for job in jobs if job in matching or (not job.operator and (job.framework, job.recipe, job.seed) in wanted)]
    rows = execute(jobs, options.jobs, options.rows, options.minutes * 60)
    command = " ".join(["python -m benchmarks.detection", *(word for word in sys.argv[1:] if word not in ("--out", str(options.out)))])
    out = options.out or (Path(tempfile.mkdtemp()) if options.quick or options.only else HERE)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results(rows, command, len(jobs)), indent=1) + "\n", encoding="utf-8")
    text = markdown(rows, command, len(jobs))
    (out / "results.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {out}")
    if not options.quick:
        return 0
    figures = summary(rows)
    lost = sum("skipped" in row for row in rows) + len(jobs) - len(rows) + figures["not learnt"]
    recall = figures["recall"]
    failures = [f"{figures['false alarms']} false alarms"] if figures["false alarms"] else []
    failures += [f"{lost} runs without a result"] if lost else []
    failures += [f"{figures['errors inside trainvet']} runs with an error inside trainvet"] if figures["errors inside trainvet"] else []
    failures += [f"{recall.hits} of {recall.of} faults diagnosed, fewer than {LEAST:.0%}"] if recall.hits < LEAST * recall.of else []
    print("; ".join(failures) or "quick check passed", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

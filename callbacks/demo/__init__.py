"""``trainvet demo``: healthy and broken trainings on handwritten digits, with Lightning and Keras, and what trainvet finds in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trainvet.callbacks.demo.program import Outcome
from trainvet.rule import catalogue, defect

NEEDS = {"lightning": ("lightning", "torch"), "keras": ("keras", "tensorflow")}
EXTRA = {"lightning": "lightning", "keras": "tensorflow"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}
# Nets this small are slower with more threads, by far so on a busy machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


def main(frameworks: Sequence[str] = (), log_dir: str | os.PathLike[str] | None = None) -> int:
    """Train, tell, and compare what was found with what is wrong.

    Args:
        frameworks: "lightning" and "keras"; nothing given means those that are installed. Each runs in a process of its own.
        log_dir: where the runs go; default "runs/demo/<time>".

    Returns:
        0 when each broken net got the expected finding and each healthy one no warning, 1 when not, 2 when something needed is not installed.
    """
    if not _installed("sklearn"):
        return _refuse('the demo needs scikit-learn: pip install "trainvet[demo]"')
    lacking = {name: next((module for module in modules if not _installed(module)), "") for name, modules in NEEDS.items()}
    present = [name for name in NEEDS if not lacking[name]]
    absent = [name for name in frameworks or NEEDS if name not in present]
    if absent and (frameworks or not present):
        return _refuse(f'the demo needs {lacking[absent[0]]}: pip install "trainvet[{EXTRA[absent[0]]},demo]"')
    directory = Path(log_dir) if log_dir is not None else Path("runs") / "demo" / time.strftime("%Y%m%d-%H%M%S")
    outcomes: list[Outcome] = []
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "outcomes.jsonl"
        for name in frameworks or present:
            sys.stdout.flush()
            command = [sys.executable, "-m", f"trainvet.callbacks.demo.{name}", str(directory), str(results)]
            code = subprocess.run(command, env={**ONE_THREAD, **os.environ, **QUIET}, stderr=subprocess.STDOUT, check=False).returncode
            if code:
                broken.append(f"the {name} programs broke off with exit code {code}")
        outcomes = Outcome.read(results)
    print("\n" + "\n".join(table(outcomes)))
    wrong = [outcome for outcome in outcomes if not outcome.right]
    for line in broken:
        print(line)
    for name in absent:
        print(f'{lacking[name]} is not installed, the {name} programs were left out: pip install "trainvet[{EXTRA[name]},demo]"')
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} programs went as expected")
    print(f"to look at them: tensorboard --logdir {directory}")
    return 1 if wrong or broken or not outcomes else 0


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line per program (what is wrong, expected, found), a second one for the place and what to try."""
    names = {code: f"{code} {defect(kind)}" for code, kind in catalogue().items()}
    rows = [("", "program", "expected", "found")]
    for outcome in outcomes:
        found = ", ".join(dict.fromkeys(names.get(code, code) for code in outcome.codes)) or "nothing"
        expected = names.get(outcome.expected, outcome.expected) or "nothing"
        rows.append(("ok" if outcome.right else "WRONG", f"{outcome.framework}: {outcome.title}", expected, found))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    shown = ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]
    indent = " " * (widths[0] + 4)
    lines = shown[:1]
    for line, outcome in zip(shown[1:], outcomes, strict=True):
        lines.append(line)
        if outcome.code:
            lines.append(f"{indent}at {outcome.where or 'the run'}; try: {outcome.fix}")
        lines += [f"{indent}error inside trainvet: {error.strip().splitlines()[-1]}" for error in outcome.errors]
    return lines


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _refuse(message: str) -> int:
    print(f"trainvet: {message}", file=sys.stderr)
    return 2

"""What importing and running trainvet loads: no framework that the user's program has not loaded itself. Each case is a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "keras", "tensorflow", "jax", "tensorboard", "rich", "sklearn", "pandas", "matplotlib"}
TOLD = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def loaded(*statements: str) -> set[str]:
    """The top-level modules a fresh process has loaded after ``statements``."""
    done = subprocess.run([sys.executable, "-c", "\n".join([*statements, TOLD])], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def needs(*modules: str) -> None:
    """Skip where a framework is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")


def test_the_core_loads_no_framework() -> None:
    modules = loaded("import trainvet, trainvet.monitor, trainvet.rule", "trainvet.rule.catalogue()")
    assert "numpy" in modules
    assert modules & FRAMEWORKS == set()


@pytest.mark.parametrize("command", [["rules"], ["rule", "NF101"], ["--version"]])
def test_the_command_line_loads_no_framework(command: list[str]) -> None:
    run = f"from trainvet.__main__ import main\ntry:\n    main({command!r})\nexcept SystemExit as end:\n    assert not end.code, end.code"
    assert loaded(run) & FRAMEWORKS == set()


def test_sinks_load_no_training_framework() -> None:
    needs("tensorboard")
    modules = loaded("import trainvet.integrations.tensorboard.sink, trainvet.integrations.jsonl, trainvet.integrations.console")
    assert modules & {"torch", "lightning", "pytorch_lightning", "keras", "tensorflow", "jax"} == set()


def test_lightnings_callback_adds_no_framework_to_lightning() -> None:
    needs("lightning")
    alone = loaded("import lightning.pytorch")
    with_us = loaded("import lightning.pytorch", "import trainvet.callbacks.lightning")
    assert "torch" in alone
    assert (with_us - alone) & FRAMEWORKS == set()


def test_the_loop_needs_torch_alone() -> None:
    needs("torch")
    assert (loaded("import torch", "import trainvet.callbacks.loop") - loaded("import torch")) & FRAMEWORKS == set()


def test_keras_callback_adds_no_framework_to_keras() -> None:
    needs("keras", "tensorflow")
    backend = "import os; os.environ['KERAS_BACKEND'] = 'tensorflow'"
    alone = loaded(backend, "import keras")
    with_us = loaded(backend, "import keras", "import trainvet.callbacks.keras")
    assert "tensorflow" in alone
    assert (with_us - alone) & FRAMEWORKS == set()


def test_importing_trainvet_is_quick() -> None:
    """CPU seconds over numpy, which it needs anyway. 0.1 s is the aim; a loaded machine is given five times that."""
    timed = "import time, numpy; start = time.process_time(); import trainvet; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", timed], cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.5

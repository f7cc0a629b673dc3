"""Runs what the examples and the README show, each program in a process and a directory of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT)}


def needs(*modules: str) -> None:
    """Skip where something is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")


def run(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Run Python with ``arguments`` in ``cwd``; returns standard output. Anything but the exit code ``code`` fails the test."""
    environment = {**ONE_THREAD, **os.environ, **QUIET}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout

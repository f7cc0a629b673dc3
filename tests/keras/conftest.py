"""Keras on TensorFlow, one thread, no GPU; tiny models that are built twice from the same seed."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.keras.recorder import Recorder

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = all(importlib.util.find_spec(name) is not None for name in ("keras", "tensorflow"))
# the backends that are not measured have a test of their own
collect_ignore_glob = [] if HERE and os.environ["KERAS_BACKEND"] == "tensorflow" else ["test_*.py"]


@pytest.fixture
def watch(tmp_path):
    """A Diagnostics that measures everything and judges nothing, unless told otherwise."""
    from trainvet.callbacks.keras import Diagnostics

    def make(**arguments):
        return Diagnostics(**{"log_dir": tmp_path / "run", "select": (), "rules": [Recorder()], **arguments})

    return make

"""Keras on JAX and on PyTorch is not measured yet: that is said, and the training is left alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import keras, numpy
from trainvet.callbacks.keras import Diagnostics

def trained(callbacks):
    keras.utils.set_random_seed(0)
    x, y = numpy.ones((32, 4), "float32"), numpy.ones((32, 1), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    return model.get_weights()

diagnostics = Diagnostics(log_dir="run")
for bare, ours in zip(trained([]), trained([diagnostics]), strict=True):
    numpy.testing.assert_array_equal(bare, ours)
report = diagnostics.report
assert report.errors == () and report.status == "finished" and report.findings == (), report
assert {item.state for item in report.coverage} == {"not observable"}, report.coverage
print(*report.notes, sep="\\n")
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_it_is_said_and_training_goes_on(backend: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"backend {backend}: nothing is observed" in done.stdout

"""The cost of watching a Keras training on TensorFlow and the CPU: ``fit`` bare against default settings with all default rules.

python benchmarks/overhead/keras.py [--rounds 8] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["KERAS_BACKEND"] = "tensorflow"
here = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != here]  # this file's name would hide the keras package
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

sys.path.append(here)
from measure import Arm, interleave, machine, report  # noqa: E402

from trainvet.callbacks.keras import Diagnostics  # noqa: E402

EVERY = 50  # the default interval of runs of 3,000 steps and more
layers = keras.layers


def mlp():
    """10 tensors, 4 layers of 256, batches of 128."""
    model = keras.Sequential([keras.Input((64,)), *[layers.Dense(256, activation="relu") for _ in range(4)], layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (64,), 128


def convolutions():
    """10 tensors, 16 x 16 images, batches of 32."""
    blocks = [part for width in (16, 32, 32) for part in (layers.Conv2D(width, 3, padding="same", activation="relu"), layers.MaxPooling2D())]
    model = keras.Sequential([keras.Input((16, 16, 3)), *blocks, layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (16, 16, 3), 32


def transformer():
    """35 tensors, 2 blocks of width 64, 32 places, batches of 16."""
    inputs = keras.Input((32, 64))
    hidden = inputs
    for _ in range(2):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(4, 16)(normed, normed)
        hidden = hidden + layers.Dense(64)(layers.Dense(256, activation="gelu")(layers.LayerNormalization()(hidden)))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))))
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (32, 64), 16


class Turn(keras.callbacks.Callback):
    """Lets a ``fit`` in a thread of its own run one epoch at a time, so that several can be interleaved within one process."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.go.acquire()

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.done.release()


class Run:
    """One way of training; :meth:`epoch` trains one epoch and gives back CPU seconds per step."""

    def __init__(self, make, watch: Diagnostics | None, steps: int, epochs: int) -> None:
        keras.utils.set_random_seed(0)
        model, shape, batch = make()
        generator = np.random.default_rng(0)
        x = generator.standard_normal((steps * batch, *shape)).astype("float32")
        y = generator.integers(0, 10, len(x))
        self.steps, self.watch, self.turn = steps, watch, Turn()
        callbacks = [self.turn, *([watch] if watch else [])]
        fit = {"batch_size": batch, "epochs": epochs, "verbose": 0, "callbacks": callbacks}
        self.thread = threading.Thread(target=lambda: model.fit(x, y, **fit), daemon=True)
        self.thread.start()
        self.taken, self.first, self.before = 0, 0.0, 0.0

    def spent(self) -> float:
        return self.watch._probe.stepper.own_seconds if self.watch is not None else 0.0

    def own(self) -> float:
        return (self.spent() - self.before) / (self.taken * self.steps)

    def epoch(self) -> float:
        started = time.process_time()
        self.turn.go.release()
        self.turn.done.acquire()
        spent = time.process_time() - started
        if not self.first:  # it holds tracing and the dense start
            self.first, self.before = spent, self.spent()
        else:
            self.taken += 1
        return spent / self.steps


def compare(title: str, make, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        vet = lambda: Diagnostics(log_dir=directory, every=EVERY)  # noqa: E731
        runs = {name: Run(make, vet() if name == "Diagnostics" else None, steps, rounds + 1) for name in ("bare", "bare again", "Diagnostics")}
        table = [Arm(name, run.epoch, run.own if run.watch else None) for name, run in runs.items()]
        interleave(table, rounds)
        report(title, table, steps)
        watched, bare = runs["Diagnostics"].first, runs["bare"].first
        print(f"  the first epoch cost {watched:.1f} s CPU, bare {bare:.1f} s: tracing the measured step, and a dense start of 10 steps")
        for run in runs.values():
            run.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="fewer steps: a smoke test, no figure")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    machine()
    steps = 60 if arguments.quick else 250
    compare("MLP, 10 tensors", mlp, steps, arguments.rounds)
    compare("convolutions, 10 tensors", convolutions, steps, arguments.rounds)
    compare("transformer, 35 tensors", transformer, steps, arguments.rounds)


if __name__ == "__main__":
    main()

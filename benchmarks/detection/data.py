"""Real data that installed packages ship: scikit-learn's small sets, and documentation texts as characters."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from benchmarks.detection.setup import Array

Split = tuple[Array, Array, Array, Array]  # x, y, validation x, validation y


def split(x: Array, y: Array, seed: int, share: float = 0.2) -> Split:
    """Shuffle, and keep ``share`` of the rows for validation."""
    order = np.random.default_rng(seed).permutation(len(x))
    held = int(len(x) * share)
    return x[order[held:]], y[order[held:]], x[order[:held]], y[order[:held]]


def digits(seed: int, shape: tuple[int, ...] = (64,)) -> Split:
    """1,797 handwritten digits, float32 in [0, 1], labels 0 to 9."""
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    return split((loaded.data / 16.0).astype(np.float32).reshape(-1, *shape), loaded.target.astype(np.int64), seed)


def table(name: str, seed: int, scale_target: bool = True) -> Split:
    """One of scikit-learn's tables ("iris", "wine", "breast_cancer", "diabetes"), standardised with the training rows' mean and deviation."""
    datasets = importlib.import_module("sklearn.datasets")
    loaded = getattr(datasets, f"load_{name}")()
    regression = name == "diabetes"
    x, y, val_x, val_y = split(loaded.data.astype(np.float32), loaded.target.astype(np.float32 if regression else np.int64), seed)
    mean, deviation = x.mean(0), x.std(0)
    if regression and scale_target:
        middle, spread = y.mean(), y.std()
        y, val_y = (y - middle) / spread, (val_y - middle) / spread
    return (x - mean) / deviation, y, (val_x - mean) / deviation, val_y


@functools.cache
def text(package: str, length: int = 60_000) -> str:
    """The docstrings of a package's public functions, in alphabetical order, ASCII only."""
    module = importlib.import_module(package)
    pages = [getattr(module, name).__doc__ or "" for name in sorted(dir(module)) if not name.startswith("_") and callable(getattr(module, name))]
    return "".join(letter for letter in "\n".join(dict.fromkeys(pages)) if letter.isascii())[:length]


def alphabet() -> list[str]:
    """The letters of numpy's documentation; index 0 is for whatever else there is."""
    return ["\0", *sorted(set(text("numpy")))]


def encode(letters: str) -> Array:
    """int64 [n]."""
    index = {letter: number for number, letter in enumerate(alphabet())}
    return np.array([index.get(letter, 0) for letter in letters], dtype=np.int64)


def characters(seed: int, length: int = 32, pieces: int = 1200) -> Split:
    """Pieces of numpy's documentation, int64 [n, length], and the same pieces one letter on."""
    ids = encode(text("numpy"))
    starts = np.random.default_rng(seed).integers(0, int(len(ids) * 0.9) - length - 1, pieces)
    held = np.random.default_rng(seed + 1).integers(int(len(ids) * 0.9), len(ids) - length - 1, pieces // 5)
    take = lambda at, shift: np.stack([ids[start + shift : start + shift + length] for start in at])  # noqa: E731
    return take(starts, 0), take(starts, 1), take(held, 0), take(held, 1)


def authors(seed: int, length: int = 48, pieces: int = 1600) -> Split:
    """Which of two documentations a piece is from: int64 [n, length], and 0 (numpy) or 1 (modules of the standard library)."""
    sources = [encode(text("numpy")), encode("".join(text(name, 12_000) for name in ("os", "shutil", "subprocess", "inspect", "logging", "random")))]
    generator = np.random.default_rng(seed)
    rows, labels = [], []
    for label, ids in enumerate(sources):
        for start in generator.integers(0, len(ids) - length, pieces // 2):
            rows.append(ids[start : start + length])
            labels.append(label)
    return split(np.stack(rows), np.array(labels, dtype=np.int64), seed)

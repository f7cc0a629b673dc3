"""The data of the demo: scikit-learn's 1,797 images of handwritten digits, which come with the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
TRAINING = 1408  # 22 batches of 64


def digits() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Training and validation set: images float32 [n, 64] in [0, 1], labels int64 [n], shuffled once and always alike."""
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images, labels = (loaded.data / 16.0).astype(np.float32)[order], loaded.target.astype(np.int64)[order]
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def with_a_hole(images: Images) -> Images:
    """The same images, one row of which is missing (NaN), as after 0 / 0 while scaling."""
    damaged = images.copy()
    damaged[700] = np.nan
    return damaged

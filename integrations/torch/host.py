"""The statistics of tensors that lie in host memory, through numpy: on small CPU tensors it costs a fraction of what torch's calls do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainvet.integrations.torch.kernels import CLOSE
from trainvet.statistics import Vector, limits_of

Array = npt.NDArray[Any]
SMALL = 1 << 11  # elements up to which the call costs more than the work
BLOCK = 1 << 15  # elements that are laid end to end at a time: what fits the cache


def arrays(tensors: Sequence[Tensor | None]) -> list[Array | None] | None:
    """The tensors' memory as arrays (None stays None); None unless all are strided CPU tensors of float32 or float64."""
    found: list[Array | None] = []
    try:
        for tensor in tensors:
            if tensor is None:
                found.append(None)
                continue
            values = tensor.detach().numpy()
            if values.dtype.char not in "fd":  # float16 would be summed, and overflow, in float16
                return None
            found.append(values)
    except (TypeError, RuntimeError):  # a sparse, device or bfloat16 tensor
        return None
    return found


def norms_at_once(tensors: Sequence[Tensor | None]) -> Vector | None:
    """L2 norm of each gradient, float64 [P]; None unless all are strided CPU tensors of float32 or float64. This is the hot path on CPU:
    one BLAS dot product per tensor is faster than the multi-tensor norm, for small and for large tensors."""
    squares = []
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor in tensors:
                values = tensor.numpy().ravel(order="K")  # type: ignore[union-attr]
                if values.dtype.char not in "fd":
                    return None
                squares.append(values.dot(values))
    except (TypeError, RuntimeError, AttributeError):  # a None, a sparse, device, bfloat16 or differentiable gradient
        return None
    return np.sqrt(np.array(squares, dtype=np.float64))


def norms(values: Sequence[Array | None]) -> Vector:
    """L2 norm of each array, float64 [P], from one BLAS dot product each; 0 for None."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [float(flat.dot(flat)) for flat in map(_flat, values)]
    return np.sqrt(np.array(squares, dtype=np.float64))


def table(values: Sequence[Array | None], names: Iterable[str], lengths: Vector) -> dict[str, Vector]:
    """Statistics of each array, {name: float64 [P]}, as :func:`trainvet.integrations.torch.kernels.table` defines them; ``lengths`` are its norms.

    A finite norm spares the counting of non-finite elements. Small arrays are measured together, laid end to end: a call costs more than they do.
    """
    names = tuple(names)
    columns = {name: np.zeros(len(values)) for name in names}
    block: list[int] = []
    filled = 0
    with np.errstate(all="ignore"):  # NaN and infinity are what we measure, not worth a warning
        for index, array in enumerate(values):
            if array is None or not array.size:
                continue
            if array.size > SMALL:
                seen: dict[str, float] = {}
                for name in names:
                    columns[name][index] = _statistic(name, array, float(lengths[index]), seen)
                continue
            block.append(index)
            filled += array.size
            if filled > BLOCK:
                _together(columns, values, lengths, block)
                block, filled = [], 0
        if block:
            _together(columns, values, lengths, block)
    return columns


def _together(columns: dict[str, Vector], values: Sequence[Array | None], lengths: Vector, block: Sequence[int]) -> None:
    """Fill in the columns of the arrays whose indices are in ``block``."""
    arrays = [array for index in block if (array := values[index]) is not None]
    flat = np.concatenate([array.ravel() for array in arrays], dtype=np.float64)
    sizes = np.array([array.size for array in arrays])
    starts = np.cumsum(sizes) - sizes
    mean, low, high = np.add.reduceat(flat, starts) / sizes, np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
    for name, column in columns.items():
        if name == "mean":
            column[block] = mean
        elif name == "std":
            column[block] = np.sqrt(np.add.reduceat(np.square(flat - np.repeat(mean, sizes)), starts) / sizes)
        elif name in ("min", "max"):
            column[block] = low if name == "min" else high
        elif name == "abs_max":
            column[block] = np.maximum(-low, high)
        elif name == "abs_mean":
            column[block] = np.add.reduceat(np.abs(flat), starts) / sizes
        elif name == "zero_share":
            column[block] = np.add.reduceat(flat == 0, starts, dtype=np.int64) / sizes
        elif (limits := limits_of(name)) is not None:
            column[block] = np.add.reduceat((flat >= limits[0]) & (flat <= limits[1]), starts, dtype=np.int64) / sizes
        elif name in ("nan", "inf"):
            for index in np.array(block)[~np.isfinite(lengths[block])].tolist():
                column[index] = _statistic(name, np.asarray(values[index]), float(lengths[index]), {})
        elif name == "identical_rows":
            for index, array in zip(block, arrays, strict=True):
                column[index] = _identical_rows(array)
        else:
            raise KeyError(name)


def pick(values: Sequence[Array | None], indices: Sequence[Tensor | None]) -> tuple[Array, list[int]]:
    """A copy of the chosen elements of each array (all of them where the index is None), laid end to end, and how many there are of each."""
    flats = []
    for array, index in zip(values, indices, strict=True):
        flat = np.empty(0, dtype=np.float32) if array is None else array.ravel()
        flats.append(flat if index is None else flat[index.numpy()])
    return np.concatenate(flats), [len(flat) for flat in flats]


def update_columns(before: Array, after: Array, sizes: Sequence[int]) -> dict[str, Vector]:
    """update.ratio, rms, unchanged, close and abs_mean_ratio, float64 [P], from the samples of all parameters, laid end to end, ``sizes`` [P]."""
    lengths = np.array(sizes)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[lengths > 0]
    change, size = np.zeros(len(lengths)), np.zeros(len(lengths))
    unchanged, close, relative = np.zeros(len(lengths)), np.zeros(len(lengths)), np.zeros(len(lengths))
    if len(starts):
        with np.errstate(all="ignore"):
            moved, around = np.abs(after.astype(np.float64) - before), np.abs(before.astype(np.float64))
            close[lengths > 0] = np.logical_and.reduceat(moved <= CLOSE[0] + CLOSE[1] * around, starts)
            held = lengths[lengths > 0]
            relative[lengths > 0] = np.add.reduceat(moved, starts) / held / (np.add.reduceat(around, starts) / held + 1e-9)
            change[lengths > 0] = np.sqrt(np.add.reduceat(np.square(after.astype(np.float64) - before), starts))
            size[lengths > 0] = np.sqrt(np.add.reduceat(np.square(before.astype(np.float64)), starts))
            unchanged[lengths > 0] = np.logical_and.reduceat(after == before, starts)
            ratio = np.where((size == 0) & (change == 0), 0.0, change / size)
    else:
        ratio = np.zeros(len(lengths))
    return {"ratio": ratio, "rms": change / np.sqrt(np.maximum(1, lengths)), "unchanged": unchanged, "close": close, "abs_mean_ratio": relative}


def _flat(array: Array | None) -> Array:
    return np.empty(0) if array is None else array.ravel(order="K")


def _statistic(name: str, array: Array, length: float, seen: dict[str, float]) -> float:
    if name in seen:
        return seen[name]
    count = array.size
    if name == "mean":
        value = float(np.add.reduce(array, axis=None)) / count
    elif name == "std":
        mean = _statistic("mean", array, length, seen)
        square = length * length / count
        value = (square - mean * mean) ** 0.5 if square - mean * mean > 1e-3 * square else float(array.std(dtype=np.float64))
    elif name in ("min", "max"):
        value = float(np.minimum.reduce(array, axis=None) if name == "min" else np.maximum.reduce(array, axis=None))
    elif name == "abs_max":
        value = max(abs(_statistic("min", array, length, seen)), abs(_statistic("max", array, length, seen)))
    elif name == "abs_mean":
        value = float(np.add.reduce(np.abs(array), axis=None)) / count
    elif name == "zero_share":
        value = 1 - np.count_nonzero(array != 0) / count  # counting booleans is four times faster
    elif name in ("nan", "inf"):
        value = 0.0 if np.isfinite(length) else float(np.count_nonzero(np.isnan(array) if name == "nan" else np.isinf(array)))
    elif name == "identical_rows":
        value = _identical_rows(array)
    elif (limits := limits_of(name)) is not None:
        value = np.count_nonzero((array >= limits[0]) & (array <= limits[1])) / count
    else:
        raise KeyError(name)
    seen[name] = value
    return value


def _identical_rows(array: Array) -> float:
    if array.ndim < 2 or len(array) < 2 or array.item(0) != array.item(array.size // len(array)):
        return 0.0
    return float(bool((array == array[:1]).all()))

"""What a loss is given as prediction, reduced on the host: rows, simplex, extremes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvet.statistics import Table, limits_of

ELEMENTS = 1 << 22  # of a larger prediction the first samples are looked at
CLOSE = 1e-3
Array = npt.NDArray[Any]


def table(predictions: Mapping[str, Array], whole: Mapping[str, bool], by_class: Mapping[str, bool], want: frozenset[str]) -> Table | None:
    """Table "output": predictions [samples, …, units] by name. ``whole``: are these all samples of the batch? ``by_class``: entries of the last
    axis belong together; otherwise all values of a sample do."""
    rows = {name: measure(array, whole.get(name, True), by_class.get(name, True), want) for name, array in predictions.items() if array.size}
    keys = [key for key in dict.fromkeys(key for row in rows.values() for key in row) if key in want]
    return Table(tuple(rows), {key: np.array([row.get(key, np.nan) for row in rows.values()]) for key in keys}) if rows else None


def measure(array: Array, whole: bool, by_class: bool, want: frozenset[str]) -> dict[str, float]:
    """The statistics of one prediction."""
    wide = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    wide = wide.reshape(1) if wide.ndim == 0 else wide
    samples = len(wide)
    units = 1 if wide.ndim < 2 else wide.shape[-1] if by_class else wide.size // samples
    rows = wide.reshape(-1, units)
    found: dict[str, float] = {"samples": float(len(rows)), "units": float(units)}
    with np.errstate(all="ignore"):
        low, high = float(wide.min()), float(wide.max())
        found |= {"min": low, "max": high, "abs_max": float(np.maximum(abs(low), abs(high)))}
        if want & {"mean", "std", "rms"}:
            mean, variance = float(wide.mean(dtype=np.float64)), float(wide.var(dtype=np.float64))
            found |= {"mean": mean, "std": variance**0.5, "rms": (variance + mean * mean) ** 0.5}
        if "abs_mean" in want:
            found["abs_mean"] = float(np.abs(wide).mean(dtype=np.float64))
        found["zero_share"] = 1 - np.count_nonzero(wide) / wide.size
        found |= {"nan": float(np.count_nonzero(np.isnan(wide))), "inf": float(np.count_nonzero(np.isinf(wide)))}
        sums = rows.sum(1, dtype=np.float64)
        if "simplex_share" in want:
            found["simplex_share"] = float((((rows >= 0) & (rows <= 1)).all(1) & (np.abs(sums - 1) <= CLOSE)).mean())
        if want & {"log_simplex_share", "log_normalizer"}:
            top = rows.max(1)
            normaliser = np.log(np.exp(rows - top[:, None]).sum(1, dtype=np.float64)) + top
            found["log_simplex_share"] = float(((rows <= 0).all(1) & (np.abs(np.exp(normaliser) - 1) <= CLOSE)).mean())
            found["log_normalizer"] = float(np.abs(normaliser).mean())
        if "column_error" in want and whole:
            found["column_error"] = float(np.abs(wide.reshape(samples, -1).sum(0, dtype=np.float64) - 1).max())
        if "constant" in want:
            found["constant"] = float(samples > 1 and bool((wide == wide[:1]).all()))
        for key in want:
            limits = limits_of(key)
            if limits is not None:
                found[key] = float(((wide >= limits[0]) & (wide <= limits[1])).mean())
    return found

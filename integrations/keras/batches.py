"""Inputs and labels of a measured batch, reduced on the host: the batch is at hand there, so none of it costs the compiled step an operation."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from trainvet.statistics import Table, limits_of

BLOCK = 1 << 20  # elements that are reduced at a time
SLOTS, ROWS = 4096, 512  # samples that are remembered for pairs, and of a batch that are compared
SLACK = 1e-3  # how far a soft label may lie outside [0, 1]
PLAIN = frozenset({"mean", "std", "min", "max", "abs_mean", "mean_square", "zero_share", "nan", "inf", "integers"})
CHANNELS = frozenset({"channel_offset", "channel_std_min", "channel_std_max"})
CLASSES = frozenset({"classes", "seen", "entropy", "top_share", "rarest_share", "batch_entropy"})
Array = npt.NDArray[Any]
Cells = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is known of the labels of one loss: ``kind`` as in ``statistics.Loss``, ``classes``, whether they are class indices ("sparse"), and the
    index that the loss leaves out."""

    kind: str = "unknown"
    classes: int = 0
    sparse: bool = False
    ignored: int | None = None


@dataclasses.dataclass
class Moments:
    """Sums over some elements, per channel [C], put together block by block (Chan, Golub and LeVeque)."""

    count: int = 0
    mean: Any = 0.0
    spread: Any = 0.0
    low: Any = np.inf
    high: Any = -np.inf

    def add(self, block: Array) -> None:
        """Elements [n, C]."""
        mean = block.mean(0, dtype=np.float64)
        spread = np.square(block - mean, dtype=np.float64).sum(0)
        total = self.count + len(block)
        shift = mean - self.mean
        self.spread = self.spread + spread + shift * shift * (self.count * len(block) / total)
        self.mean = self.mean + shift * (len(block) / total)
        self.count = total
        self.low, self.high = np.minimum(self.low, block.min(0)), np.maximum(self.high, block.max(0))

    def whole(self) -> tuple[float, float]:
        """Mean and standard deviation over all channels."""
        mean = float(np.mean(self.mean))
        return mean, float(np.sqrt(np.mean(self.spread) / max(1, self.count) + np.mean(np.square(self.mean - mean))))


class Classes:
    """The class labels of one loss counted so far: ``counts`` by class, ``mass`` what each was given, weighted where samples are."""

    def __init__(self) -> None:
        self.counts: Array = np.zeros(0)
        self.mass: Array = np.zeros(0)

    def add(self, label: Array, target: Target, weights: Array | None) -> Cells:
        """Count one batch. Empty where the labels are no classes."""
        read = _classes(label, target, weights)
        if read is None:
            return {}
        batch, mass, plain, bad = read
        if batch is None or mass is None or plain is None:
            return {"out_of_range": bad}
        if self.counts.shape != batch.shape:
            self.counts, self.mass = np.zeros_like(batch), np.zeros_like(mass)
        self.counts, self.mass = self.counts + batch, self.mass + mass
        seen = float(self.counts.sum())
        return {
            "out_of_range": bad,
            "classes": float(np.count_nonzero(self.counts)),
            "seen": seen,
            "entropy": entropy(self.mass),
            "top_share": float(self.counts.max()) / max(seen, 1.0),
            "rarest_share": float(self.counts.min()) / max(seen, 1.0),
            "batch_entropy": entropy(plain),
        }


class Pairs:
    """Pairs of samples with equal inputs among the last :data:`SLOTS` samples, and those of them whose labels differ."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()
        self._pairs = self._differ = 0

    def add(self, inputs: Sequence[Array], label: Array) -> Cells:
        """The first :data:`ROWS` samples of a batch."""
        count = min(ROWS, len(label))
        for key, own in zip(_hashes([array[:count] for array in inputs]), _hashes([label[:count]]), strict=True):
            before = self._seen.pop(key, None)
            if before is not None:
                self._pairs += 1
                self._differ += before != own
            self._seen[key] = own
            if len(self._seen) > SLOTS:
                self._seen.popitem(last=False)
        return {"pairs": float(self._pairs), "contradictions": float(self._differ)}


class Batches:
    """Tables "input" and "label" of measured batches. Keeps running class counts and hashes of samples, in bounded memory."""

    def __init__(self, want: Mapping[str, Sequence[str]]) -> None:
        """``want``: the statistics that are read, by target."""
        self.want = {target: frozenset(want.get(target, ())) for target in ("input", "label")}
        self.first_channel: dict[str, bool] = {}
        self._classes: dict[str, Classes] = {}
        self._pairs = Pairs()

    def tables(self, batch: Any, targets: Mapping[str, Target] | None, padded: frozenset[str] = frozenset()) -> dict[str, Table]:
        """The tables of one batch as ``train_step`` is given it. ``targets``: what the losses make of the labels, by name; None where the labels
        are not the batch's own. ``padded``: integer inputs whose 0 is padding."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        inputs = dict(_arrays(x, "input"))
        rows: dict[str, dict[str, Cells]] = {"input": {}, "label": {}}
        if self.want["input"]:
            for name, array in inputs.items():
                rows["input"][name] = measure(array, self.want["input"], self.first_channel.get(name, False), name in padded)
        if self.want["label"] and targets is not None:
            given = [array for _, array in _arrays(weights, "weight")]
            labels = dict(_arrays(y, "label"))
            for index, (name, array) in enumerate(labels.items()):
                weight = given[index] if len(given) == len(labels) else given[0] if len(given) == 1 else None
                rows["label"][name] = self._label(name, array, targets.get(name, Target()), weight, list(inputs.values()) if index == 0 else [])
        return {target: _table(found, self.want[target]) for target, found in rows.items() if found}

    def _label(self, name: str, label: Array, target: Target, weights: Array | None, inputs: Sequence[Array]) -> Cells:
        cells = measure(label, self.want["label"] - CHANNELS, False, False)
        if self.want["label"] & (CLASSES | {"out_of_range"}):
            cells |= self._classes.setdefault(name, Classes()).add(label, target, weights)
        same = [array for array in inputs if array.ndim and label.ndim and len(array) == len(label)]
        if self.want["label"] & {"pairs", "contradictions"} and same and len(same) == len(inputs):
            cells |= self._pairs.add(same, label)
        return cells


def measure(array: Array, want: frozenset[str], first_channel: bool = False, padded: bool = False) -> Cells:
    """The wanted statistics of one input or label [batch, …]; channels stand last, or in dimension 1 with ``first_channel``."""
    samples = array.shape[0] if array.ndim else 1
    cells: Cells = {"count": float(samples)}
    if not array.size:
        return cells
    floating = array.dtype.kind not in "iub"
    ranged = {key: limits for key in want if (limits := limits_of(key)) is not None}
    if want & (PLAIN | CHANNELS) or ranged:
        sums, moments = dict.fromkeys(("abs", "square", "zero", "nan", "inf", "odd", *ranged), 0.0), Moments()
        with np.errstate(all="ignore"):
            for block in _blocks(array, first_channel):
                moments.add(block)
                sums["zero"] += np.count_nonzero(block == 0)
                sums["abs"] += float(np.abs(block).sum(dtype=np.float64)) if "abs_mean" in want else 0.0
                sums["square"] += float(np.square(block, dtype=np.float64).sum()) if "mean_square" in want else 0.0
                if floating:
                    sums["nan"] += np.count_nonzero(np.isnan(block))
                    sums["inf"] += np.count_nonzero(np.isinf(block))
                    sums["odd"] += np.count_nonzero(block != np.floor(block)) if "integers" in want else 0.0
                for key, (low, high) in ranged.items():
                    sums[key] += np.count_nonzero((block >= low) & (block <= high))
            mean, std = moments.whole()
            cells |= {"mean": mean, "std": std, "min": float(np.min(moments.low)), "max": float(np.max(moments.high))}
            cells |= {"nan": sums["nan"], "inf": sums["inf"], "integers": float(sums["odd"] == 0)}
            cells |= {"zero_share": sums["zero"] / array.size, "abs_mean": sums["abs"] / array.size, "mean_square": sums["square"] / array.size}
            cells |= {key: sums[key] / array.size for key in ranged}
            if floating and want & CHANNELS:
                cells |= _channels(moments)
    if "constant_features" in want:
        cells["constant_features"] = float(np.count_nonzero((array == array[:1]).all(0) & (array[0] != 0))) if samples > 1 else 0.0
    if "padding_share" in want and padded and not floating:
        cells["padding_share"] = float(np.count_nonzero(array == 0)) / array.size
    if "fingerprint" in want:
        cells["fingerprint"] = float(zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data) & 0xFFFFFF)
    return cells


def entropy(mass: Array) -> float:
    """Entropy in nats of a distribution given by non-negative numbers [classes]; 0 where there are none."""
    whole = float(mass.sum())
    shares = mass[mass > 0] / whole if whole > 0 else np.ones(1)
    return max(0.0, float(-(shares * np.log(shares)).sum()))


def named(value: Any, target: str) -> dict[str, Any]:
    """The leaves of a nested structure: "input" for a single one, its keys for a dictionary, else "input.0", "input.1", …"""
    flat = [(path, leaf) for path, leaf in (keras.tree.flatten_with_path(value) if value is not None else []) if leaf is not None]
    names: dict[str, Any] = {}
    for index, (path, leaf) in enumerate(flat):
        keys = ".".join(str(part) for part in path if not isinstance(part, int))
        name = f"{target}.{keys}" if keys else target if len(flat) == 1 else f"{target}.{index}"
        names[name if name not in names else f"{name}#{index}"] = leaf
    return names


def _channels(moments: Moments) -> Cells:
    spread = np.sqrt(moments.spread / moments.count)
    varies = moments.high > moments.low
    if not varies.any():
        return {"channel_offset": np.nan, "channel_std_min": np.nan, "channel_std_max": 0.0}
    offset = np.abs(moments.mean[varies]) / spread[varies]
    return {"channel_offset": float(offset.max()), "channel_std_min": float(spread[varies].min()), "channel_std_max": float(spread[varies].max())}


def _blocks(array: Array, first_channel: bool) -> Iterator[Array]:
    """Elements as [n, C], some samples at a time; one channel where there is one dimension."""
    if array.ndim < 2:
        yield _wide(array.reshape(-1, 1))
        return
    step = max(1, BLOCK // max(1, array.size // len(array)))
    for start in range(0, len(array), step):
        block = array[start : start + step]
        block = np.moveaxis(block, 1, -1) if first_channel and block.ndim > 2 else block
        yield _wide(block.reshape(-1, block.shape[-1]))


def _wide(block: Array) -> Array:
    return block.astype(np.float64) if block.dtype.kind in "iub" else block if block.dtype in (np.float32, np.float64) else block.astype(np.float32)


def _classes(label: Array, target: Target, weights: Array | None) -> tuple[Array | None, Array | None, Array | None, float] | None:
    """Labels by class; what each class was given, weighted and not; how many labels the loss has no room for."""
    if not label.size:
        return None
    each = weights.reshape(-1).astype(np.float64) if weights is not None and label.ndim and weights.size == len(label) else None
    if target.kind == "cross_entropy" and target.classes > 1:
        if target.sparse:
            flat = label.reshape(-1)
            counted = slice(None) if target.ignored is None else flat != target.ignored
            each = None if each is None or len(each) != len(flat) else each[counted]
            flat = flat[counted]
            inside: Array = (flat >= 0) & (flat < target.classes)
            index = np.where(inside, flat, 0).astype(np.int64)
            share = inside if each is None else inside * each
            batch = np.bincount(index, inside, target.classes)
            return batch, np.bincount(index, share, target.classes), batch, float(np.count_nonzero(~inside))
        if label.shape[-1] != target.classes:
            return None
        rows = label.reshape(-1, target.classes).astype(np.float64)
        inside = np.asarray(((rows >= -SLACK) & (rows <= 1 + SLACK)).all(1))
        kept = np.clip(rows * inside[:, None], 0, None)
        share = kept if each is None or len(each) != len(rows) else kept * each[:, None]
        return np.bincount(rows.argmax(1), inside, target.classes), share.sum(0), kept.sum(0), float(np.count_nonzero(~inside))
    if target.kind == "binary_cross_entropy":
        flat = label.reshape(-1).astype(np.float64)
        inside = (flat >= 0) & (flat <= 1)
        bad = float(np.count_nonzero(~inside))
        if flat.size != (len(label) if label.ndim else 1):
            return None, None, None, bad
        given = np.stack([np.where(inside, 1 - flat, 0.0), np.where(inside, flat, 0.0)])
        high = float(np.count_nonzero(inside & (flat > 0.5)))
        share = given if each is None else given * each
        return np.array([float(inside.sum()) - high, high]), share.sum(1), given.sum(1), bad
    return None


def _arrays(value: Any, target: str) -> Iterator[tuple[str, Array]]:
    """The numeric leaves on the host, by name."""
    for name, leaf in named(value, target).items():
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape") or type(leaf).__name__ in ("RaggedTensor", "SparseTensor"):
            continue
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        if array.dtype.kind in "fiub":
            yield name, array


def _hashes(arrays: Sequence[Array]) -> list[bytes]:
    """One per sample, over all arrays [batch, …]."""
    rows = [np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8) for array in arrays]
    return [hashlib.blake2b(b"".join(row[index].tobytes() for row in rows), digest_size=8).digest() for index in range(len(rows[0]))]


def _table(rows: Mapping[str, Cells], want: frozenset[str]) -> Table:
    keys = [key for key in dict.fromkeys(key for cells in rows.values() for key in cells) if key in want]
    return Table(tuple(rows), {key: np.array([cells.get(key, np.nan) for cells in rows.values()]) for key in keys})

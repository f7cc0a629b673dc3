"""Hashes of samples: whether two batches, or two samples, are the same. In bounded memory, without random numbers of the user's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainvet.integrations.torch.moments import Number

BLOCK = 1 << 20  # elements that are hashed at a time
LONGEST = 1 << 16  # features that have a multiplier of their own
SLOTS = 4096  # samples that are remembered
ROWS = 512  # samples of a batch that are compared
_MIX = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number: odd
_STIR = -4658895280553007687
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = npt.NDArray[np.int64]
Hashes = Any  # int64 [B]: an array in host memory, else a tensor on the device; the arithmetic is the same


class Hasher:
    """Multiply-and-add hashing with fixed odd 64-bit multipliers; arithmetic wraps around."""

    def __init__(self) -> None:
        self._host: Array = np.zeros(0, dtype=np.int64)
        self._device: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def samples(self, tensor: Tensor) -> Hashes:
        """One hash per sample (first dimension) of a strided tensor: equal elements give equal ones."""
        rows = _as_integers(tensor.detach())
        count, features = rows.shape
        width = max(1, min(LONGEST, features, BLOCK // max(1, count)))
        host = rows.device.type == "cpu"
        bits: Any = rows.numpy() if host else rows
        result: Any = np.zeros(count, dtype=np.int64) if host else torch.zeros(count, dtype=torch.int64, device=rows.device)
        multipliers: Any = self._for(width) if host else self._on(width, rows.device)
        for start in range(0, features, width):
            block = bits[:, start : start + width]
            chosen = multipliers[: block.shape[1]]
            result = result * _MIX + (block.astype(np.int64) @ chosen if host else (block.to(torch.int64) * chosen).sum(1))
        return _stirred(result + features)

    @torch.no_grad()
    def fingerprint(self, hashes: Hashes) -> Number:
        """A whole number below 2^24 from the hashes of a batch's samples in their order; float32 0-d on a device."""
        if isinstance(hashes, Tensor):
            places = torch.arange(1, len(hashes) + 1, device=hashes.device)
            return ((_stirred((hashes * (places * _MIX | 1)).sum()) >> 20) & 0xFFFFFF).float()
        odd = np.arange(1, len(hashes) + 1) * np.int64(_MIX) | 1
        return float((_stirred((hashes * odd).sum(keepdims=True)) >> 20)[0] & 0xFFFFFF)

    def _for(self, width: int) -> Array:
        if len(self._host) < width:
            random = np.random.default_rng(20)  # a generator of our own
            self._host = random.integers(-(1 << 63), 1 << 63, size=width, dtype=np.int64) | 1
        return self._host[:width]

    def _on(self, width: int, device: torch.device) -> Tensor:
        known = self._device.get(device)
        if known is None or len(known) < width:
            known = self._device[device] = torch.from_numpy(self._for(width).copy()).to(device)
        return known[:width]


class Pairs:
    """Pairs of samples with the same input that were met, and those whose labels differ; the last samples are remembered.

    In host memory the oldest is forgotten first; on a device each hash has one slot of a table, and the newest keeps it.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._host = [0, 0]
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, inputs: Sequence[Hashes], labels: Hashes) -> tuple[Number, Number]:
        """The hashes of one batch, [B] for each input and for the labels; gives pairs and contradictions so far."""
        whole = labels * 0
        for hashes in inputs:
            whole = _stirred(whole * _MIX + hashes)
        if isinstance(whole, Tensor):
            return self._on_device(whole[:ROWS], labels[:ROWS])
        for key, label in zip(whole[:ROWS].tolist(), labels[:ROWS].tolist(), strict=True):
            before = self._seen.pop(key, None)
            if before is not None:
                self._host[0] += 1
                self._host[1] += before != label
            self._seen[key] = label
            if len(self._seen) > SLOTS:
                self._seen.popitem(last=False)
        return float(self._host[0]), float(self._host[1])

    @torch.no_grad()
    def _on_device(self, whole: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        if self._inputs is None or self._inputs.device != whole.device or self._labels is None or self._counts is None:
            self._inputs = torch.zeros(SLOTS, dtype=torch.int64, device=whole.device)
            self._labels, self._counts = torch.zeros_like(self._inputs), torch.zeros(2, dtype=torch.int64, device=whole.device)
        order = torch.argsort(whole, stable=True)
        whole, label = whole[order], label[order]
        twin = whole[1:] == whole[:-1]
        slots = whole & (SLOTS - 1)
        first = torch.ones_like(whole, dtype=torch.bool)
        first[1:] = ~twin
        met = (self._inputs[slots] == whole) & first
        contradictions = (twin & (label[1:] != label[:-1])).sum() + (met & (self._labels[slots] != label)).sum()
        self._counts = self._counts + torch.stack([twin.sum() + met.sum(), contradictions])
        # where two samples share a slot the same one of them wins in both tables
        winner = torch.zeros(SLOTS, dtype=torch.int64, device=slots.device)
        winner.scatter_reduce_(0, slots, torch.arange(1, len(slots) + 1, device=slots.device), "amax")
        place = (winner - 1).clamp_min(0)
        self._inputs = torch.where(winner > 0, whole[place], self._inputs)
        self._labels = torch.where(winner > 0, label[place], self._labels)
        return self._counts[0].float(), self._counts[1].float()


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer, [B, features]."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    return rows.contiguous().view(_BITS[rows.element_size()]) if rows.is_floating_point() else rows


def _stirred(value: Any) -> Any:
    """High bits into low ones and back, so that every bit depends on every other."""
    value = (value ^ (value >> 29)) * _STIR
    return value ^ (value >> 32)

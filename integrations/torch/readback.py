"""Bringing numbers to the host without making the device wait: a ring of pinned rows with events. On CPU a row is there at once."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainvet.statistics import Vector

SLOTS = 8
T = TypeVar("T")


@dataclasses.dataclass
class _Sent:
    row: Tensor
    event: Any


class Readback(Generic[T]):
    """Rows on their way from the device. ``send`` never waits: when all slots are in flight the row is dropped and counted."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.slots = slots
        self.dropped = 0
        self._flying: deque[tuple[_Sent, T]] = deque()
        self._pinned: dict[int, list[Tensor]] = {}

    @property
    def flying(self) -> bool:
        """Is anything on its way?"""
        return bool(self._flying)

    def send(self, row: Tensor, note: T) -> bool:
        """Hand over a flat device tensor with what belongs to it; False where it had to be dropped."""
        if row.device.type == "cpu":
            self._flying.append((_Sent(row, None), note))
            return True
        if len(self._flying) >= self.slots:
            self.dropped += 1
            return False
        host = self._slot(row)
        host.copy_(row, non_blocking=True)
        event = torch.cuda.Event() if row.device.type == "cuda" else None
        if event is not None:
            event.record()
        self._flying.append((_Sent(host, event), note))
        return True

    def poll(self, wait: bool = False) -> list[tuple[Vector, T]]:
        """Rows that have arrived, in order, as float64 arrays; ``wait`` drains everything (end of the run, checkpoint, strict)."""
        arrived = []
        while self._flying:
            sent, note = self._flying[0]
            if sent.event is not None and not sent.event.query():
                if not wait:
                    break
                sent.event.synchronize()
            self._flying.popleft()
            arrived.append((sent.row.numpy().astype(np.float64), note))
            if sent.event is not None:
                self._pinned.setdefault(sent.row.numel(), []).append(sent.row)
        return arrived

    def _slot(self, row: Tensor) -> Tensor:
        free = self._pinned.get(row.numel())
        if free:
            return free.pop()
        return torch.empty(row.numel(), dtype=row.dtype, pin_memory=row.device.type == "cuda")

"""One optimizer-step attempt on its way from the device to a row: what was measured, packed and unpacked."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch.plan import Owned, Sketch
from trainvet.statistics import Vector


@dataclasses.dataclass(slots=True)
class Attempt:
    """The numbers of one attempt. ``losses`` holds the micro-batches' losses; ``norms`` the gradients' norms [P], on the device.

    ``parts`` are further columns (target, statistic, device vector) in the order in which the packed row holds them; ``constant`` columns
    are known on the host. ``known``: loss and norms have been read already. ``scaled``: the gradients still carry the loss scale.
    ``bad``: not finite and nobody else skips it; ``armed``: the guard decides on the device; ``held``: the guard held the update, ``dropped``:
    as one of those allowed.
    """

    step: int
    batch: int
    epoch: int
    owned: Owned
    sampled: bool
    rates: tuple[float, ...]
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    norms: Tensor | None = None
    scale: Tensor | None = None
    overflow: Tensor | None = None
    scaled: bool = False
    parts: list[tuple[str, str, Tensor]] = dataclasses.field(default_factory=list)
    names: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constant: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    columns: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    sketch: Sketch | None = None
    bad: bool = False
    armed: bool = False
    held: bool = False
    dropped: bool = False
    known: bool = False
    loss: float = 0.0
    norm: float = 0.0
    host_norms: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))
    scale_value: float = 1.0
    skipped: bool = False

    @property
    def changed(self) -> bool:
        """Did this attempt move weights?"""
        return not (self.skipped or self.held)

    @property
    def finite(self) -> bool:
        """Are loss and gradients finite?"""
        return math.isfinite(self.norm) and math.isfinite(self.loss)

    def read(self, host_norms: Vector | None = None) -> None:
        """Read loss, norms and scale now (on CPU that costs nothing; elsewhere it waits for the device)."""
        self.known = True
        losses = self.losses
        if losses:
            self.loss = losses[0].item() if len(losses) == 1 and losses[0].numel() == 1 else float(np.mean([float(loss.sum()) for loss in losses]))
        if self.scale is not None and self.overflow is not None:
            self.scale_value, self.skipped = float(self.scale), bool(self.overflow > 0)
        if host_norms is None:
            assert self.norms is not None
            host_norms = self.norms.cpu().numpy().astype(np.float64)
        self._norms(host_norms)

    def head(self) -> Tensor:
        """Loss, scale, overflow flag and norms as one device vector [3 + P]."""
        assert self.norms is not None
        cells = [loss.reshape(-1).sum() for loss in self.losses]
        loss = torch.stack([cell.to(self.norms) for cell in cells]).mean() if cells else self.norms.new_zeros(())
        scale = self.norms.new_ones(()) if self.scale is None else self.scale.to(self.norms)
        flag = self.norms.new_zeros(()) if self.overflow is None else self.overflow.to(self.norms)
        return torch.cat([torch.stack([loss, scale, flag]), self.norms])

    def pack(self) -> Tensor:
        """Everything that is still on the device as one vector."""
        parts = [part.reshape(-1) for _, _, part in self.parts]
        if not self.known:
            head = self.head()
            return torch.cat([head, *(part.to(head.device) for part in parts)])
        if not parts:
            return torch.zeros(0)
        return torch.cat([part.to(parts[0].device) for part in parts])

    def unpack(self, values: Vector) -> None:
        """The inverse of :meth:`pack`, on the host."""
        offset = 0
        if not self.known and self.norms is not None:
            self.loss, self.scale_value, self.skipped = float(values[0]), float(values[1]), bool(values[2] > 0)
            offset = 3 + self.norms.numel()
            self._norms(values[3:offset])
            self.known = True
        self.columns = dict(self.constant)
        for target, statistic, part in self.parts:
            self.columns[target, statistic] = values[offset : offset + part.numel()]
            offset += part.numel()

    def _norms(self, norms: Vector) -> None:
        if self.scaled and self.scale_value:
            norms = norms / self.scale_value
        self.host_norms = norms
        self.norm = math.sqrt(float(norms @ norms))

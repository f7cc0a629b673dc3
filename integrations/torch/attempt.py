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
    are known on the host.
    ``run`` holds numbers of the whole step. ``known``: loss and norms have been read already. ``scaled``: the gradients still carry the loss scale.
    ``bad``: not finite and nobody else skips it; ``armed``: the guard decides on the device; ``held``: the guard held the update, ``dropped``:
    as one of those allowed.
    """

    step: int
    batch: int
    epoch: int
    owned: Owned
    sampled: bool
    rates: tuple[float | Tensor, ...]
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    norms: Tensor | None = None
    scale: Tensor | None = None
    overflow: Tensor | None = None
    scaled: bool = False
    parts: list[tuple[str, str, Tensor]] = dataclasses.field(default_factory=list)
    names: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constant: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    columns: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    run: dict[str, float] = dataclasses.field(default_factory=dict)
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
    _head: Tensor | None = None

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
        if host_norms is None:
            assert self.norms is not None
            host_norms = self.norms.cpu().numpy().astype(np.float64)
        if self.scale is not None:
            self.scale_value = float(self.scale)
            self.skipped = not bool(np.isfinite(host_norms).all()) if self.overflow is None else bool(self.overflow > 0)
        self._norms(host_norms)

    def head(self) -> Tensor:
        """Loss, norms, with a scaler the scale and its overflow flag where it is known, and rates, as one device vector; made once."""
        if self._head is None:
            assert self.norms is not None
            cells = [loss if loss.numel() == 1 else loss.sum() for loss in self.losses]
            if len(cells) > 1:
                cells = [torch.stack([cell.reshape(()).to(self.norms) for cell in cells]).mean()]
            parts = [cells[0].reshape(1).to(self.norms) if cells else self.norms.new_zeros(1), self.norms]
            rates = [rate for rate in self.rates if isinstance(rate, Tensor)]
            parts += [cell.reshape(1).to(self.norms) for cell in (self.scale, self.overflow, *rates) if cell is not None]
            self._head = torch.cat(parts)
        return self._head

    def pack(self) -> Tensor:
        """Everything that is still on the device as one vector."""
        parts = [part.reshape(-1) for _, _, part in self.parts]
        if not self.known:
            head = self.head()
            return torch.cat([head, *(part.to(head.device) for part in parts)]) if parts else head
        if not parts:
            return torch.zeros(0)
        return torch.cat([part.to(parts[0].device) for part in parts])

    def unpack(self, values: Vector) -> None:
        """The inverse of :meth:`pack`, on the host."""
        offset = 0
        if not self.known and self.norms is not None:
            offset = 1 + self.norms.numel()
            norms = values[1:offset]
            if self.scale is not None:
                self.scale_value, offset = float(values[offset]), offset + 1
                self.skipped = not bool(np.isfinite(norms).all())  # a fused optimizer unscales in its step: that is what the scaler will find
            if self.overflow is not None:
                self.skipped, offset = bool(values[offset] > 0), offset + 1
            known = []
            for rate in self.rates:
                known.append(float(values[offset]) if isinstance(rate, Tensor) else rate)
                offset += isinstance(rate, Tensor)
            self.rates = tuple(known)
            self.loss = float(values[0])
            self._norms(norms)
            self.known = True
        self.columns = dict(self.constant)
        for target, statistic, part in self.parts:
            if target == "run":
                self.run[statistic] = float(values[offset])
            else:
                self.columns[target, statistic] = values[offset : offset + part.numel()]
            offset += part.numel()

    def _norms(self, norms: Vector) -> None:
        if self.scaled and self.scale_value:
            norms = norms / self.scale_value
        self.host_norms = norms
        self.norm = math.sqrt(float(norms @ norms))

"""Keeping a poisoned update out of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from trainvet.integrations.torch.plan import Owned

DEVICE_SIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def device_side(owned: Owned) -> bool:
    """Can the fused update skip itself on the device? Other optimizers silently ignore the flag, so this is a white list."""
    return owned.fused and type(owned.optimizer) in DEVICE_SIDE


class Guard:
    """Holds updates whose loss or gradients are not finite.

    On the host side (CPU, or ``strict``) the decision is known before the update: gradients are withdrawn, which makes the step an exact no-op for
    every torch optimizer. On the device side a fused optimizer is handed a latch as its ``found_inf``: it skips, exactly, from the first bad step on,
    without a host sync, until the run ends. Floating buffers are copied before the forward and put back when the step was bad.
    """

    def __init__(self, latched: bool, allowed: int) -> None:
        """``latched``: hold everything after the first bad step (abort); ``allowed``: how many bad updates may be dropped (skip)."""
        self.latched = latched
        self.allowed = allowed
        self.dropped = 0
        self._latch: Tensor | None = None
        self._armed: torch.optim.Optimizer | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def before_forward(self, buffers: dict[str, Tensor]) -> None:
        """Copy the floating buffers (normalisation statistics): a bad forward poisons them although the update is held."""
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]

    def hold(self, owned: Owned) -> bool:
        """Host side: make this optimizer's step a no-op. True where the step is one of the ``allowed``, and is dropped quietly."""
        for parameter in owned.tensors:
            parameter.grad = None
        self.restore_buffers()
        if self.dropped >= self.allowed:
            return False
        self.dropped += 1
        return True

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the floating buffers back as they were before the forward."""
        for buffer, kept in self._buffers:
            buffer.copy_(kept)

    @torch.no_grad()
    def arm(self, owned: Owned, total: Tensor) -> None:
        """Device side: the fused step skips itself when ``total`` (0-d, loss plus gradient norm) is not finite, or ever was."""
        bad = (~torch.isfinite(total)).to(torch.float32)
        if self._latch is None or not self.latched:
            self._latch = bad
        else:
            self._latch = torch.maximum(self._latch, bad)
        owned.optimizer.found_inf = self._latch  # type: ignore[attr-defined]
        owned.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._armed = owned.optimizer

    def disarm(self) -> None:
        """Right after the step: a left-over attribute would make GradScaler fail."""
        if self._armed is not None:
            for attribute in ("found_inf", "grad_scale"):
                if hasattr(self._armed, attribute):
                    delattr(self._armed, attribute)
            self._armed = None

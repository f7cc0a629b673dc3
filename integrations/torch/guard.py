"""Keeping a poisoned update out of the weights."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from trainvet.integrations.torch.plan import Owned

DEVICE_SIDE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def device_side(owned: Owned) -> bool:
    """Can the fused update skip itself on the device? Other optimizers silently ignore the flag, so this is a white list."""
    return owned.fused and type(owned.optimizer) in DEVICE_SIDE


class Guard:
    """Holds updates whose loss or gradients are not finite.

    On the host side (CPU, or ``strict``) the decision is known before the update: gradients are withdrawn, which makes the step an exact no-op for
    every torch optimizer. On the device side a fused optimizer is handed a flag as its ``found_inf``: it skips, exactly, without a host sync.
    A ``latched`` flag stays up, so that the weights stay as they were before the first bad step until the run ends. Buffers are copied before the
    forward and put back when the step was bad.

    ``exhausted``: there was a bad update more than the ``allowed`` ones.
    """

    def __init__(self, aborts: bool, allowed: int) -> None:
        """``aborts``: the run is to end at the first bad step; ``allowed``: how many bad updates may be dropped before that.

        ``depth``, which the probe raises where rows arrive late, is the number of steps whose buffers are kept.
        """
        self.depth = 1
        self.latched = aborts and allowed == 0
        self.allowed = allowed
        self.dropped = 0
        self.exhausted = False
        self._flag: Tensor | None = None
        self._armed: list[torch.optim.Optimizer] = []
        self._buffers: deque[tuple[int, list[tuple[Tensor, Tensor]]]] = deque()

    def before_forward(self, module: nn.Module, step: int) -> None:
        """Copy the buffers (normalisation statistics) at the start of ``step``: a bad forward poisons them although the update is held."""
        self._buffers.append((step, [(buffer, buffer.detach().clone()) for buffer in module.buffers() if buffer.device.type != "meta"]))
        while len(self._buffers) > self.depth:
            self._buffers.popleft()

    def count(self) -> bool:
        """One more bad update. True where it is one of the ``allowed``."""
        if self.dropped < self.allowed:
            self.dropped += 1
            return True
        self.exhausted = True
        return False

    def hold(self, owned: Owned, step: int) -> bool:
        """Host side: make this optimizer's step a no-op. True where the step is one of the ``allowed``, and is dropped quietly."""
        for group in owned.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.restore_buffers(step)
        return self.count()

    @torch.no_grad()
    def restore_buffers(self, step: int) -> None:
        """Put the buffers back as they were before the forward of ``step``; copies made after it were poisoned by it, and are so no more."""
        known = [copies for at, copies in self._buffers if at <= step]
        if not known:
            return
        for buffer, kept in known[-1]:
            buffer.copy_(kept)
        self._buffers = deque((at, copies if at <= step else known[-1]) for at, copies in self._buffers)

    @torch.no_grad()
    def arm(self, owned: Owned, total: Tensor) -> None:
        """Device side: the fused step skips itself when ``total`` (0-d, loss plus gradient norms) is not finite, or, latched, ever was."""
        bad = (total * 0 != 0).to(torch.float32)  # infinity times 0 is NaN, and NaN is not equal to 0
        self._flag = bad if self._flag is None or not self.latched else torch.maximum(self._flag, bad)
        owned.optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        owned.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._armed.append(owned.optimizer)

    def disarm(self) -> None:
        """Right after the step: a left-over attribute would make GradScaler fail."""
        for optimizer in self._armed:
            for attribute in ("found_inf", "grad_scale"):
                if hasattr(optimizer, attribute):
                    delattr(optimizer, attribute)
        self._armed = []

"""The loss scale as torch's GradScaler keeps it, read without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossScale:
    """Follows a GradScaler (``torch.amp.GradScaler`` or a subclass); without one every question has the neutral answer.

    The scale and the overflow flags are private device tensors of the scaler, updated in place: they are copied, never kept.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    def __bool__(self) -> bool:
        return self.scaler is not None

    @property
    def growth_interval(self) -> int:
        """Clean steps after which the scale doubles; 0 without a scaler."""
        return int(self.scaler.get_growth_interval()) if self.scaler is not None else 0

    def scale(self) -> Tensor | None:
        """The scale in force, a 0-d float32 copy; None before the first scaled loss."""
        value = getattr(self.scaler, "_scale", None)
        return value.detach().clone() if value is not None else None

    def overflow(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """How many devices found a non-finite gradient for this optimizer in this step, 0-d float32; None where it is not known yet
        (a fused optimizer unscales inside its step)."""
        if self.scaler is None:
            return None
        found = self.scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device", {})
        flags = [flag.detach() for flag in found.values()]
        return torch.stack([flag.reshape(()).to(flags[0].device) for flag in flags]).sum() if flags else None

    def unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Were this optimizer's gradients already divided by the scale?"""
        if self.scaler is None:
            return True
        stage = self.scaler._per_optimizer_states[id(optimizer)].get("stage")
        return getattr(stage, "value", 0) >= 1

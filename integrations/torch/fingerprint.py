"""Are these the weights that were trained? Sums over each parameter, compared without keeping a copy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

CLOSE = 1e-5  # a sum taken on another device or after a trip through a file differs in its last digits
Marks = dict[str, tuple[float, float]]


class Fingerprints:
    """What the weights were at the end of a fit and whenever a checkpoint was written; the newest ``most`` are kept."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._known: list[Marks] = []

    def keep(self, module: nn.Module) -> None:
        """These weights are ones that were trained."""
        self._known = [*self._known[1 - self.most :], marks(module)]

    def strange(self, module: nn.Module) -> bool | None:
        """Are the weights none that were kept? None for a module with other parameters: it is another model, and meant to be one."""
        now = marks(module)
        same = [known for known in self._known if known.keys() == now.keys()]
        if not same or not now:
            return None
        return not any(all(_close(known[name], now[name]) for name in now) for known in same)


@torch.no_grad()
def marks(module: nn.Module) -> Marks:
    """For each parameter the sum of its elements and of their absolute values. Reads the device."""
    found: Marks = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter) or parameter.device.type == "meta" or parameter.layout is not torch.strided or parameter.is_quantized:
            continue
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        found[name] = (float(real.sum(dtype=torch.float64)), float(real.abs().sum(dtype=torch.float64)))
    return found


def _close(left: tuple[float, float], right: tuple[float, float]) -> bool:
    """NaN is like NaN; the tolerance is that of the sum of absolute values."""
    limit = CLOSE * max(left[1], right[1])
    return all(a == b or (a != a and b != b) or abs(a - b) <= limit for a, b in zip(left, right, strict=True))

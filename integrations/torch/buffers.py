"""The statistics of buffers: running statistics, copies of weights, masks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch import host, kernels
from trainvet.integrations.torch.attempt import Attempt

EACH, TOTAL = 1 << 16, 1 << 20  # elements up to which a buffer, and all of them together, are kept whole to be compared


class Buffers:
    """Measures buffers on sampled steps, and remembers them from one sample to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, attempt: Attempt, buffers: Mapping[str, Tensor], want: frozenset[str]) -> None:
        """The wanted statistics as columns of ``attempt``: known at once in host memory, on the device elsewhere."""
        attempt.names["buffer"] = tuple(buffers)
        tensors: list[Tensor | None] = list(buffers.values())
        sizes = np.sqrt([max(1, tensor.numel()) for tensor in buffers.values()])
        values = host.arrays(tensors)
        if values is not None:
            lengths = host.norms(values)
            found = host.table(values, [*kernels.COUNTS, "abs_max"], lengths)
            attempt.constant["buffer", "nonfinite"] = found["nan"] + found["inf"]
            attempt.constant["buffer", "abs_max"] = found["abs_max"]
            attempt.constant["buffer", "rms"] = lengths / sizes
        else:
            columns = kernels.table(tensors, [*kernels.COUNTS, "abs_max"])
            attempt.parts += [("buffer", "nonfinite", columns["nan"] + columns["inf"]), ("buffer", "abs_max", columns["abs_max"])]
            lengths_there = kernels.norms(tensors)
            attempt.parts.append(("buffer", "rms", lengths_there / torch.from_numpy(sizes).to(lengths_there)))
        if "buffer.changed" in want:
            flags = self._changed(buffers)
            if all(flag.device.type == "cpu" for flag in flags):
                attempt.constant["buffer", "changed"] = np.array([float(flag) for flag in flags])
            else:
                home = next(flag.device for flag in flags if flag.device.type != "cpu")
                attempt.parts.append(("buffer", "changed", torch.stack([flag.to(home) for flag in flags])))

    def _changed(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        flags, spent, kept = [], 0, self._kept
        self._kept = {}
        for name, buffer in buffers.items():
            whole = buffer.numel() <= EACH and spent + buffer.numel() <= TOTAL
            spent += buffer.numel() if whole else 0
            now = buffer.detach().clone() if whole else fingerprint(buffer)
            before = kept.get(name)
            self._kept[name] = now
            if before is None or before.shape != now.shape or before.device != now.device:
                flags.append(torch.zeros((), device=buffer.device))
            else:
                flags.append(((now != before) & ~((now != now) & (before != before))).any().float())  # NaN stays NaN
        return flags


def fingerprint(tensor: Tensor) -> Tensor:
    """Some elements of a large tensor, and its sum: what changes it changes them."""
    flat = kernels.flat_real(tensor.detach()).reshape(-1)
    some = flat[:: max(1, flat.numel() // 4096)].double()
    return torch.cat([some, flat.sum(dtype=torch.float64).reshape(1)])

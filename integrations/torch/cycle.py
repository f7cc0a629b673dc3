"""From the first backward of an optimizer step to its update: left-over gradients, the first micro-batch's gradient, and what clipping did."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainvet.integrations.torch import host, kernels
from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.known import Known
from trainvet.integrations.torch.plan import Owned

WATCHED = 3  # parameters whose first gradient of a step is waited for


class Cycle:
    """What is measured of a sampled step before its gradients are complete. Hooks stand from the forward to the optimizer step only."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._stale: dict[int, Tensor | float] = {}
        self._small: Tensor | None = None

    def begin(self, owned: Owned) -> None:
        """The forward of a step begins: the first gradient that reaches a parameter finds out whether another one is still there."""
        self.stop()
        chosen = [parameter for parameter in owned.tensors if parameter.requires_grad and parameter.is_leaf]
        places = sorted({0, len(chosen) // 2, len(chosen) - 1}) if chosen else []
        for parameter in [chosen[place] for place in places][:WATCHED]:
            self._hooks.append(parameter.register_hook(self._look(parameter)))

    def _look(self, parameter: Tensor) -> Any:
        def look(gradient: Tensor) -> None:
            if id(parameter) in self._stale:
                return
            old = parameter.grad
            if old is None:
                self._stale[id(parameter)] = 0.0
            elif type(old) is Tensor and old.layout is torch.strided:
                self._stale[id(parameter)] = (old.detach() != 0).any().float()

        return look

    def first_micro_batch(self, owned: Owned) -> None:
        """The backward of the first micro-batch is done."""
        if self._small is None:
            self._small = torch.linalg.vector_norm(kernels.norms([parameter.grad for parameter in owned.tensors]))

    def gradients(self, attempt: Attempt) -> None:
        """The gradients are complete: what was found goes with the attempt."""
        if self._stale:
            found = list(self._stale.values())
            left: Tensor | float = 0.0
            tensors = [cell for cell in found if isinstance(cell, Tensor)]
            if tensors:
                left = torch.stack([cell.to(tensors[0].device) for cell in tensors]).max()
            carry(attempt, "stale_gradient", left)
        if self._small is not None:
            carry(attempt, "micro_norm", self._small)
        self.stop()

    def stop(self) -> None:
        """Nothing of ours stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stale, self._small = [], {}, None


def clipped(attempt: Attempt) -> None:
    """The norm of the gradients as the update is given them. Nothing is said where one was there before and is gone."""
    gradients = [parameter.grad for parameter in attempt.owned.tensors]
    present = attempt.constant.get(("gradient", "present"))
    if present is None or any(there and gradient is None for there, gradient in zip(present.tolist(), gradients, strict=True)):
        return
    values = host.arrays(gradients)
    lengths = torch.from_numpy(host.norms(values)) if values is not None else kernels.norms(gradients)
    carry(attempt, "norm_after", torch.linalg.vector_norm(lengths))


def carry(attempt: Attempt, name: str, value: Tensor | float) -> None:
    """A number of the whole step that travels with the row."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        attempt.parts.append(("run", name, value.reshape(1)))
    else:
        attempt.run[name] = float(value)


def cells(attempt: Attempt, keys: frozenset[str], known: Known) -> dict[str, float]:
    """The numbers of the whole step, by key, once they are on the host."""
    run = attempt.run
    found = {key: value for key, value in run.items() if key in keys}
    if "stale_gradient" in run and "run.stale_gradient" in keys:
        found["run.stale_gradient"] = run["stale_gradient"]
    if attempt.skipped or attempt.held or not math.isfinite(attempt.norm):
        return found
    if "run.clip_scale" in keys:
        if known.clips_exactly and known.clipping is None:
            found |= {"run.clip_scale": 1.0} if attempt.sampled else {}
        elif known.clips_exactly:
            assert known.clipping is not None
            found["run.clip_scale"] = min(1.0, known.clipping / (attempt.norm + 1e-6))  # as clip_grad_norm_ has it
        elif attempt.sampled and attempt.norm == 0:
            found["run.clip_scale"] = 1.0
        elif run.get("norm_after", 0.0) > 0:
            found["run.clip_scale"] = run["norm_after"] / attempt.norm
    if "micro_norm" in run and "run.batch_size" in run and run.get("stale_gradient", 0.0) == 0:
        divided = float(known.accumulation)  # the trainer divides each loss by it, also where fewer micro-batches follow
        scale = attempt.scale_value if attempt.scale is not None and attempt.scale_value else 1.0
        small, big = run["micro_norm"] * divided / scale, attempt.norm * divided / run["micro_batches"]
        estimate = noise_scale(small, big, run.get("few", 0.0), run["run.batch_size"])
        if estimate is not None and math.isfinite(estimate):
            found["run.noise_scale"] = estimate
    return found


def noise_scale(small: float, big: float, few: float, many: float) -> float | None:
    """B_simple in samples (McCandlish et al. 2018, appendix A.1): the trace of the gradient's covariance over the squared norm of the true gradient,
    from the norms of the mean gradients over ``few`` and over ``many`` samples. None where one step's estimate of the latter is not positive."""
    if not 0 < few < many:
        return None
    squared = (many * big**2 - few * small**2) / (many - few)
    trace = (small**2 - big**2) / (1 / few - 1 / many)
    return max(0.0, trace) / squared if squared > 0 else None

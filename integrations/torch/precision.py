"""What narrow number formats lose: gradients that fall into float16's subnormals; and Adam's memory of the size of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.kernels import flat_real

NORMAL = 2.0**-14  # the smallest normal float16


@torch.no_grad()
def underflow_share(gradients: Sequence[Tensor | None], scale: Tensor, scaled: bool) -> Tensor:
    """Share of the non-zero elements whose scaled magnitude is below 2^-14, float32 [P]; 0 for None. ``scale`` 0-d; ``scaled``: they carry it."""
    cells = []
    for gradient in gradients:
        if gradient is None or not gradient.numel():
            cells.append(torch.zeros((), device=scale.device))
            continue
        size = flat_real(gradient.detach()).abs().float()
        limit = NORMAL if scaled else NORMAL / scale.to(size.device)
        there = size > 0
        cells.append(((size < limit) & there).sum().float() / there.sum().clamp(min=1))
    return torch.stack([cell.to(scale.device) for cell in cells]) if cells else torch.zeros(0)


@torch.no_grad()
def moment_ratio(attempt: Attempt) -> Tensor | None:
    """Root mean square of each gradient over the square root of Adam's mean bias-corrected second moment, float32 [P], before the update; NaN for a
    parameter without such a moment, None where no parameter has one. Steps that the optimizer counts on the device are not waited for."""
    optimizer, norms = attempt.owned.optimizer, attempt.norms
    betas = {id(parameter): group.get("betas") for group in optimizer.param_groups for parameter in group["params"]}
    cells, some = [], False
    assert norms is not None
    for place, parameter in enumerate(attempt.owned.tensors):
        state, pair = optimizer.state.get(parameter, {}), betas.get(id(parameter))
        second, count = state.get("exp_avg_sq"), state.get("step")
        if not isinstance(second, Tensor) or second.shape != parameter.shape or count is None or not isinstance(pair, tuple | list) or len(pair) < 2:
            cells.append(norms.new_full((), torch.nan))
            continue
        some = True
        beta = float(pair[1])
        kept = 1 - beta ** (count.to(norms) if isinstance(count, Tensor) and count.device == norms.device else float(count))
        mean = second.mean(dtype=norms.dtype).to(norms.device) / kept
        size = norms[place] / parameter.numel() ** 0.5
        if attempt.scaled and attempt.scale is not None:
            size = size / attempt.scale.to(size)
        cells.append(torch.where((mean == 0) & (size == 0), 0.0, size / mean.sqrt()))
    return torch.stack([cell.to(norms) for cell in cells]) if some else None

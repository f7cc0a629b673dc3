"""The measuring kernels: one multi-tensor norm per step, full statistics on sampled steps. Results stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FULL = ("mean", "abs_mean", "std", "abs_max", "min", "max", "zero_share", "nan", "inf", "identical_rows")


def flat_real(tensor: Tensor) -> Tensor:
    """A strided real tensor with the same elements: values of a sparse one, complex ones as pairs, narrow floats as they are."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def norms(tensors: Sequence[Tensor | None]) -> Tensor:
    """L2 norm of each tensor, float32 [P] (float64 where a tensor is); 0 for None and empty tensors.

    One multi-tensor call per dtype group, accumulated in float32, so that fp16 does not overflow; non-finite elements propagate, which makes
    the norm the non-finite flag too (a norm beyond 1.8e19 of finite elements also overflows: counts tell them apart).
    """
    present = [(index, flat_real(tensor.detach())) for index, tensor in enumerate(tensors) if tensor is not None and tensor.numel()]
    if not present:
        return torch.zeros(len(tensors))
    if len({(tensor.device, tensor.dtype) for _, tensor in present}) == 1:
        chosen = [tensor for _, tensor in present]
        wide = torch.float64 if chosen[0].dtype is torch.float64 else torch.float32
        measured = torch.stack(torch._foreach_norm(chosen, 2, dtype=wide))
    else:
        measured = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64).to(present[0][1].device) for _, tensor in present])
    if len(present) == len(tensors):
        return measured
    full = measured.new_zeros(len(tensors))
    full[torch.tensor([index for index, _ in present], device=measured.device)] = measured
    return full


@torch.no_grad()
def statistic(name: str, tensor: Tensor) -> Tensor:
    """One statistic of :data:`FULL` over a non-empty real tensor, float32 (float64 for float64), 0-d, on the tensor's device."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    if name == "mean":
        return wide.mean()
    if name == "abs_mean":
        return wide.abs().mean()
    if name == "std":
        return wide.std(correction=0)
    if name == "abs_max":
        return wide.abs().max()
    if name == "min":
        return wide.min()
    if name == "max":
        return wide.max()
    if name == "rms":
        return torch.linalg.vector_norm(wide) / max(1, wide.numel()) ** 0.5
    if name == "zero_share":
        return 1 - torch.count_nonzero(wide).to(wide.dtype) / wide.numel()
    if name == "nan":
        return torch.isnan(wide).sum().to(wide.dtype)
    if name == "inf":
        return torch.isinf(wide).sum().to(wide.dtype)
    if name == "identical_rows":
        if wide.dim() < 2 or wide.shape[0] < 2:
            return wide.new_zeros(())
        return (wide == wide[:1]).all().to(wide.dtype)
    raise KeyError(name)


@torch.no_grad()
def table(tensors: Sequence[Tensor | None], names: Iterable[str]) -> dict[str, Tensor]:
    """Statistics of each tensor: {name: [P]}; 0 for None and empty tensors."""
    real = [None if tensor is None or not tensor.numel() else flat_real(tensor.detach()) for tensor in tensors]
    device = next((tensor.device for tensor in real if tensor is not None), torch.device("cpu"))
    zero = torch.zeros((), device=device)
    columns = {}
    for name in names:
        cells = [zero if tensor is None or not tensor.numel() else statistic(name, tensor).to(device=device) for tensor in real]
        columns[name] = torch.stack([cell.to(torch.float64) if cell.dtype is torch.float64 else cell.float() for cell in _same(cells)])
    return columns


COUNTS = ("nan", "inf")


@torch.no_grad()
def counts(tensors: Sequence[Tensor | None], lengths: Tensor) -> dict[str, Tensor]:
    """Numbers of NaN and of infinite elements of each tensor: {"nan": [P], "inf": [P]}; ``lengths`` are the tensors' norms.

    On CPU, where looking at a number costs nothing, finite norms spare the counting.
    """
    if lengths.device.type == "cpu" and bool(torch.isfinite(lengths).all()):
        zeros = torch.zeros(len(tensors))
        return dict.fromkeys(COUNTS, zeros)
    return table(tensors, COUNTS)


@torch.no_grad()
def update_columns(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, Tensor]:
    """update.ratio, update.rms and update.unchanged [P] from samples taken before and after the update."""
    ratio, rms, unchanged = [], [], []
    for old, new in zip(before, after, strict=True):
        if not old.numel():
            ratio.append(torch.zeros(()))
            rms.append(torch.zeros(()))
            unchanged.append(torch.zeros(()))
            continue
        change = torch.linalg.vector_norm(new.float() - old.float())
        size = torch.linalg.vector_norm(old.float())
        ratio.append(torch.where(size > 0, change / size, torch.where(change > 0, torch.inf, 0.0)))
        rms.append(change / old.numel() ** 0.5)
        unchanged.append((new == old).all().float())
    device = before[0].device if before else torch.device("cpu")
    return {
        "ratio": torch.stack([value.to(device) for value in ratio]) if ratio else torch.zeros(0),
        "rms": torch.stack([value.to(device) for value in rms]) if rms else torch.zeros(0),
        "unchanged": torch.stack([value.to(device) for value in unchanged]) if unchanged else torch.zeros(0),
    }


def _same(cells: Sequence[Tensor]) -> list[Tensor]:
    wide = torch.float64 if any(cell.dtype is torch.float64 for cell in cells) else torch.float32
    return [cell.to(wide) for cell in cells]

"""The measuring kernels: one multi-tensor norm per step, full statistics on sampled steps. Results stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainvet.statistics import limits_of

FULL = ("mean", "abs_mean", "std", "abs_max", "min", "max", "zero_share", "nan", "inf", "identical_rows")
COUNTS = ("nan", "inf")
CLOSE = (1e-8, 1e-5)  # absolute and relative


def flat_real(tensor: Tensor) -> Tensor:
    """A strided real tensor with the same elements: values of a sparse one, complex ones as pairs, narrow floats as they are."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def norms(tensors: Sequence[Tensor | None]) -> Tensor:
    """L2 norm of each tensor, float32 [P] (float64 where a tensor is); 0 for None and empty tensors.

    One multi-tensor call, accumulated in float32, so that fp16 does not overflow; non-finite elements propagate, which makes
    the norm the non-finite flag too (a norm beyond 1.8e19 of finite elements also overflows: counts tell them apart).
    """
    first = tensors[0] if tensors else None
    if first is not None and all(_plain(tensor, first) for tensor in tensors):
        wide = torch.float64 if first.dtype is torch.float64 else torch.float32
        chosen = [tensor.detach() for tensor in tensors] if first.requires_grad else tensors  # type: ignore[union-attr]
        return torch.stack(torch._foreach_norm(chosen, 2, dtype=wide))  # type: ignore[arg-type]
    return _mixed_norms(tensors)


def _plain(tensor: Tensor | None, like: Tensor) -> bool:
    return (
        tensor is not None
        and tensor.dtype is like.dtype
        and tensor.layout is torch.strided
        and not tensor.is_complex()
        and tensor.device == like.device
        and tensor.requires_grad is like.requires_grad
    )


@torch.no_grad()
def _mixed_norms(tensors: Sequence[Tensor | None]) -> Tensor:
    present = [(index, flat_real(tensor.detach())) for index, tensor in enumerate(tensors) if tensor is not None and tensor.numel()]
    if not present:
        return torch.zeros(len(tensors))
    home = present[0][1].device
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, tensor in present:
        groups.setdefault((tensor.device, tensor.dtype), []).append((index, tensor))
    wide = torch.float64 if any(dtype is torch.float64 for _, dtype in groups) else torch.float32
    full = torch.zeros(len(tensors), device=home, dtype=wide)
    for members in groups.values():
        measured = torch.stack(torch._foreach_norm([tensor for _, tensor in members], 2, dtype=wide))
        full[torch.tensor([index for index, _ in members], device=home)] = measured.to(home)
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
    limits = limits_of(name)
    if limits is not None:
        return ((wide >= limits[0]) & (wide <= limits[1])).sum().to(wide.dtype) / wide.numel()
    raise KeyError(name)


def identical_rows(tensor: Tensor) -> Tensor:
    """1 where a tensor of at least two rows (first dimension) has nothing but equal ones, 0-d float32; a sparse tensor has rows of zeros too."""
    if tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.shape[0] < 2:
        return torch.zeros((), device=tensor.device)
    return (tensor == tensor[:1]).all().float()


@torch.no_grad()
def table(tensors: Sequence[Tensor | None], names: Iterable[str]) -> dict[str, Tensor]:
    """Statistics of each tensor: {name: [P]}; 0 for None and empty tensors."""
    whole = [None if tensor is None or not tensor.numel() else tensor.detach() for tensor in tensors]
    real = [None if tensor is None else flat_real(tensor) for tensor in whole]
    device = next((tensor.device for tensor in real if tensor is not None), torch.device("cpu"))
    zero = torch.zeros((), device=device)
    columns = {}
    for name in names:
        if name == "identical_rows":
            cells = [zero if tensor is None else identical_rows(tensor).to(device) for tensor in whole]
        else:
            cells = [zero if tensor is None or not tensor.numel() else statistic(name, tensor).to(device) for tensor in real]
        columns[name] = torch.stack(_same(cells))
    return columns


@torch.no_grad()
def update_columns(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, Tensor]:
    """update.ratio, rms, unchanged, close and abs_mean_ratio [P] from samples taken before and after the update."""
    found: dict[str, list[Tensor]] = {name: [] for name in ("ratio", "rms", "unchanged", "close", "abs_mean_ratio")}
    ratio, rms, unchanged, close, relative = found.values()
    for old, new in zip(before, after, strict=True):
        if not old.numel():
            for cells in (ratio, rms, unchanged, close, relative):
                cells.append(torch.zeros(()))
            continue
        wide = torch.float64 if old.dtype is torch.float64 else torch.float32
        change = torch.linalg.vector_norm(new.to(wide) - old.to(wide))
        size = torch.linalg.vector_norm(old.to(wide))
        ratio.append(torch.where((size == 0) & (change == 0), 0.0, change / size))
        rms.append(change / old.numel() ** 0.5)
        unchanged.append((new == old).all().float())
        moved, around = (new.to(wide) - old.to(wide)).abs(), old.to(wide).abs()
        close.append((moved <= CLOSE[0] + CLOSE[1] * around).all().float())
        relative.append(moved.mean() / (around.mean() + 1e-9))
    device = before[0].device if before else torch.device("cpu")
    return {name: torch.stack(_same([value.to(device) for value in cells])) if cells else torch.zeros(0) for name, cells in found.items()}


@torch.no_grad()
def swallowed(before: Sequence[Tensor], after: Sequence[Tensor], had_gradient: Sequence[Tensor | None]) -> Tensor:
    """update.swallowed_share [P]: of the sampled elements that had a gradient, the share that did not change; NaN where none had, or for None."""
    cells = [
        old.new_full((), torch.nan, dtype=torch.float32) if mask is None else ((new == old) & mask).sum().float() / mask.sum()
        for old, new, mask in zip(before, after, had_gradient, strict=True)
    ]
    return torch.stack([cell.to(before[0].device) for cell in cells])


def _same(cells: Sequence[Tensor]) -> list[Tensor]:
    wide = torch.float64 if any(cell.dtype is torch.float64 for cell in cells) else torch.float32
    return [cell.to(wide) for cell in cells]

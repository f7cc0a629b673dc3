"""Labels as the loss understands them: class indices, one-hot and soft labels, binary ones; counted over the run."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch.losses import Call
from trainvet.integrations.torch.moments import Number

CLASSES = frozenset({"classes", "seen", "entropy", "top_share", "rarest_share", "batch_entropy"})
SLACK = 1e-3  # how far a soft label may lie outside [0, 1]


class Classes:
    """The labels of one loss counted so far. ``counts`` are labels by their (most probable) class, ``mass`` what each class was given: arrays for
    labels in host memory, else tensors on their device."""

    def __init__(self) -> None:
        self.counts: Any = None
        self.mass: Any = None

    @torch.no_grad()
    def add(self, call: Call, want: AbstractSet[str]) -> dict[str, Number]:
        """Count the labels of one call; the wanted statistics of table "label" that are about classes: host numbers, or 0-d tensors.

        Binary labels of several values per sample, and targets made in the step (``torch.ones_like``), have no classes to count.
        """
        if not want & (CLASSES | {"out_of_range"}) or not call.label.numel():
            return {}
        read = _read_host(call) if call.label.device.type == "cpu" else _read(call)
        if read is None:
            return {}
        batch, mass, bad = read
        found: dict[str, Number] = {"out_of_range": bad}
        if batch is not None and mass is not None and not call.target_made and want & CLASSES:
            found |= self._count(batch, mass, call.class_weights)
        return {key: value for key, value in found.items() if key in want}

    def _count(self, batch: Any, mass: Any, weights: Tensor | None) -> dict[str, Number]:
        if self.counts is None or self.counts.shape != batch.shape or type(self.counts) is not type(batch):
            self.counts, self.mass = batch, mass
        else:
            self.counts, self.mass = self.counts + batch, self.mass + mass
        seen, weighted = self.counts.sum(), self.mass
        if weights is not None and weights.shape == self.mass.shape:
            weighted = self.mass * (weights.to(self.mass) if isinstance(self.mass, Tensor) else weights.detach().cpu().double().numpy())
        among = seen + (seen == 0)
        return {
            "classes": (self.counts > 0).sum(),
            "seen": seen,
            "entropy": entropy(weighted),
            "top_share": self.counts.max() / among,
            "rarest_share": self.counts.min() / among,
            "batch_entropy": entropy(mass),
        }


def entropy(mass: Any) -> Any:
    """Entropy in nats of a distribution given by non-negative numbers [classes]; 0 where there are none."""
    if isinstance(mass, Tensor):
        whole = mass.sum()
        return torch.special.entr(mass / torch.where(whole > 0, whole, 1.0)).sum()
    shares = mass[mass > 0] / mass.sum()
    return -float((shares * np.log(shares)).sum()) + 0.0


def ignored(call: Call) -> Tensor | None:
    """1 where the loss leaves a label out; None where it leaves none out by its index."""
    return call.label == call.ignored if call.indices and call.ignored is not None else None


def _read_host(call: Call) -> tuple[Any, Any, float] | None:
    """:func:`_read` through numpy, whose calls cost a fraction of torch's on small tensors."""
    label, classes = call.label, call.classes
    if call.kind == "cross_entropy" and classes:
        if call.indices:
            flat = label.numpy().ravel()
            inside = (flat >= 0) & (flat < classes)
            bad = ~inside
            if call.ignored is not None:
                bad &= flat != call.ignored
                if 0 <= call.ignored < classes:
                    inside &= flat != call.ignored
            batch = np.bincount(flat[inside], minlength=classes)
            return batch, batch.astype(np.float64), float(np.count_nonzero(bad))
        if tuple(label.shape) != call.shape or call.axis is None:
            return None
        rows = label.float().movedim(call.axis, -1).reshape(-1, classes).numpy().astype(np.float64)
        inside = ((rows >= -SLACK) & (rows <= 1 + SLACK)).all(1)
        kept = rows[inside]
        return np.bincount(kept.argmax(1), minlength=classes), np.maximum(kept.sum(0), 0.0), float(np.count_nonzero(~inside))
    if call.kind == "binary_cross_entropy":
        values = label.float().reshape(-1).numpy()
        inside = (values >= 0) & (values <= 1)
        out = float(np.count_nonzero(~inside))
        if label.numel() != (label.shape[0] if label.dim() else 1):
            return None, None, out
        kept = values[inside].astype(np.float64)
        high, positive = int(np.count_nonzero(kept > 0.5)), float(kept.sum())
        return np.array([len(kept) - high, high]), np.array([len(kept) - positive, positive]), out
    return None


def _read(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor] | None:
    """Labels by class, int64 [classes]; what each class was given [classes]; how many labels the loss has no room for."""
    label, classes = call.label, call.classes
    exact = torch.float32 if label.device.type == "mps" else torch.float64
    if call.kind == "cross_entropy" and classes:
        if call.indices:
            flat = label.reshape(-1).long()
            bad = (flat < 0) | (flat >= classes)
            if call.ignored is not None:
                bad &= flat != call.ignored
            inside = (flat >= 0) & (flat < classes)
            if call.ignored is not None and 0 <= call.ignored < classes:
                inside &= flat != call.ignored
            batch = torch.zeros(classes, dtype=torch.int64, device=flat.device).scatter_add_(0, flat.clamp(0, classes - 1), inside.long())
            return batch, batch.to(exact), bad.sum()
        if tuple(label.shape) != call.shape or call.axis is None:
            return None
        rows = label.movedim(call.axis, -1).reshape(-1, classes).float()
        inside = ((rows >= -SLACK) & (rows <= 1 + SLACK)).all(1)
        batch = torch.zeros(classes, dtype=torch.int64, device=rows.device).scatter_add_(0, rows.argmax(1), inside.long())
        return batch, torch.where(inside[:, None], rows, 0.0).sum(0).clamp_min(0).to(exact), (~inside).sum()
    if call.kind == "binary_cross_entropy":
        flat = label.reshape(-1).float()
        inside = (flat >= 0) & (flat <= 1)
        bad = (~inside).sum()
        if label.numel() != (label.shape[0] if label.dim() else 1):
            return None, None, bad
        positive, count = torch.where(inside, flat, 0.0).sum(), inside.sum()
        high = (inside & (flat > 0.5)).sum()
        return torch.stack([count - high, high]), torch.stack([count - positive, positive]).to(exact), bad
    return None

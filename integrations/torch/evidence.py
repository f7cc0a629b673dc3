"""What tells where a non-finite value comes from: read before the update, everything; read late, what the norms still say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainvet.integrations.torch import kernels
from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.losses import tensors_in
from trainvet.statistics import Table, Vector


def early(
    attempt: Attempt, gradients: Sequence[Tensor | None], buffers: Mapping[str, Tensor], batch: Any, paths: Mapping[str, str]
) -> dict[str, Table]:
    """Counts of NaN and infinite elements in gradients, weights, buffers, inputs and labels, before the update.

    ``paths``: place in the batch -> name.
    """
    owned = attempt.owned
    present = np.array([gradient is not None for gradient in gradients], dtype=np.float64)
    tables = {"gradient": Table(owned.names, {"norm": attempt.host_norms, "present": present, **_counts(gradients)})}
    tables["weight"] = Table(owned.names, _counts(owned.tensors))
    if buffers:
        found = _counts(list(buffers.values()))
        tables["buffer"] = Table(tuple(buffers), {"nonfinite": found["nan"] + found["inf"]})
    data: dict[str, Tensor] = {}
    for path, tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.numel():
            data.setdefault(paths.get(path, f"input.{path}" if path else "input"), tensor)
    for target in ("input", "label"):
        chosen = {name: tensor for name, tensor in data.items() if name.startswith(target)}
        if chosen:
            tables[target] = Table(tuple(chosen), _counts(list(chosen.values())))
    return tables


def late(attempt: Attempt) -> dict[str, Table]:
    """What the norms say about a bad step when its gradients are gone: a NaN norm holds a NaN; an infinite one may have overflowed."""
    nan, inf = np.isnan(attempt.host_norms).astype(np.float64), np.isinf(attempt.host_norms).astype(np.float64)
    if not nan.any():
        return {}
    return {"gradient": Table(attempt.owned.names, {"norm": attempt.host_norms, "nan": nan, "inf": inf})}


def _counts(tensors: Sequence[Tensor | None]) -> dict[str, Vector]:
    return {name: column.cpu().double().numpy() for name, column in kernels.table(tensors, kernels.COUNTS).items()}

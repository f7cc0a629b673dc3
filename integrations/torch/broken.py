"""What can still be told when the user's own code raised in a forward: indices and labels that were handed over before it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainvet.integrations.torch.activations import Look
from trainvet.integrations.torch.data import Data, Seen, named
from trainvet.integrations.torch.handed import EMBEDDINGS
from trainvet.integrations.torch.losses import KINDS, Call, tensors_in
from trainvet.integrations.torch.moments import usable
from trainvet.statistics import Table, Vector

LOSSES = {function.__code__: function for function in KINDS}
OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing", "pos_weight")
RAISED = ("input.", "label.", "output.", "module.index_")


@dataclasses.dataclass
class Sheet:
    """Columns of several targets, as :func:`trainvet.integrations.torch.data.put` fills them in."""

    names: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constant: dict[tuple[str, str], Vector] = dataclasses.field(default_factory=dict)
    parts: list[tuple[str, str, Tensor]] = dataclasses.field(default_factory=list)

    def tables(self) -> dict[str, Table]:
        """On the host; what a device does not give back any more is left out."""
        columns: dict[str, dict[str, Vector]] = {}
        for (target, statistic), column in self.constant.items():
            columns.setdefault(target, {})[statistic] = column
        for target, statistic, part in self.parts:
            try:
                columns.setdefault(target, {})[statistic] = part.cpu().double().numpy()
            except RuntimeError:  # a device that an assertion has stopped
                continue
        return {target: Table(self.names[target], found) for target, found in columns.items() if found}


def seen_before(look: Look, data: Data, batch: Any) -> Seen:
    """Inputs and calls of a look that did not come to its end, with the call that raised; ``batch``: the module's arguments, where they are known."""
    calls, pending = list(look.calls), look.handed.pending
    if pending is not None:
        known = [layer for function, layer in data.places if function == pending.function]
        if not pending.origin.layer and len(known) == 1:  # looked back at: no module was seen to return
            pending.origin = dataclasses.replace(pending.origin, layer=known[0])
        calls.append(pending)
    entered = [tensor for _, tensor in tensors_in(look.entered or batch) if usable(tensor) and tensor.numel() and tensor.dtype is not torch.bool]
    inputs = [tensor for tensor in look.inputs if tensor.dtype is not torch.bool] or [tensor for tensor in entered if not tensor.requires_grad]
    return Seen(named("input", inputs), data.name(calls), look.handed.embeddings)


def tables(look: Look, seen: Seen, data: Data, want: frozenset[str]) -> dict[str, Table]:
    """Tables "input", "label", "output" and "module" (smallest and largest index) of a look that broke off."""
    want = frozenset(key for key in want if key.startswith(RAISED) and key not in ("label.pairs", "label.contradictions", "input.fingerprint"))
    sheet, found = Sheet(), {}
    data.indices(sheet, {name: pair for name, pair in look.handed.indices.items() if not isinstance(pair[0], Tensor)}, want)
    try:
        data.sample(sheet, seen, want)
        found = sheet.tables()
    except RuntimeError:
        found = Sheet(constant={key: column for key, column in sheet.constant.items() if key[0] == "module"}, names=sheet.names).tables()
    return found | _glimpsed(look.handed.glimpses, look.handed.pending, want, found)


def explains(found: Mapping[str, Table], look: Look) -> bool:
    """Was a label or the index of an embedding out of range?"""
    labels, modules = found.get("label"), found.get("module")
    if labels is not None and bool((labels.columns.get("out_of_range", np.zeros(1)) > 0).any()):
        return True
    if modules is None or "index_min" not in modules.columns or "index_max" not in modules.columns:
        return False
    rows = {path or type(module).__name__: module.num_embeddings for path, module, _ in look.handed.embeddings}
    ranges = zip(modules.names, modules.columns["index_min"].tolist(), modules.columns["index_max"].tolist(), strict=True)
    return any(low < 0 or high >= rows.get(name, high + 1) for name, low, high in ranges)


def _glimpsed(glimpses: Mapping[str, Tensor], pending: Call | None, want: frozenset[str], found: Mapping[str, Table]) -> dict[str, Table]:
    """What was copied to the host before a device call that may have stopped the device."""
    rows = {name: copy.tolist() for name, copy in glimpses.items()}
    result = {}
    if "label" in rows and "label" not in found and pending is not None:
        low, high, outside = rows.pop("label")
        cells = {"min": low, "max": high, "out_of_range": outside}
        result["label"] = Table(("label",), {key: np.array([value]) for key, value in cells.items() if f"label.{key}" in want})
    rows.pop("label", None)
    if rows and "module" not in found and "module.index_max" in want:
        low, high = np.array([row[:2] for row in rows.values()], dtype=np.float64).T
        result["module"] = Table(tuple(rows), {"index_min": low, "index_max": high})
    return result


def look_back(error: BaseException, paths: Mapping[int, str], want: frozenset[str]) -> Look:
    """What a look would have held where none stood: the arguments of the embedding or loss function in whose call ``error`` was raised.

    They stand in the frames of its traceback; nothing is run again.
    """
    look = Look(paths, want)
    trace = error.__traceback__
    while trace is not None:
        code, seen = trace.tb_frame.f_code, trace.tb_frame.f_locals
        function, module = LOSSES.get(code), seen.get("self")
        if function is not None and "input" in seen and "target" in seen:
            look.handed.before(function, (seen["input"], seen["target"]), {key: seen[key] for key in OPTIONS if key in seen})
        elif isinstance(module, EMBEDDINGS) and code is type(module).forward.__code__ and id(module) in paths:
            look.handed.entering(paths[id(module)], module, (seen.get("input"),))
        trace = trace.tb_next
    return look

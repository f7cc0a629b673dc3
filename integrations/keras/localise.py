"""Where a non-finite value was born: the batch of the step is run once more, layer by layer, with the weights from before the update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from trainvet.finding import Evidence as Shown
from trainvet.finding import Finding
from trainvet.integrations.keras.backend import Backend
from trainvet.integrations.keras.plan import Plan


@dataclasses.dataclass
class Evidence:
    """What is at hand of a bad step: its number, its place in the epoch, the batch, and the variables' values from before it (may be empty).

    ``harmless`` are the layers whose output held NaN in good steps too.
    """

    step: int
    index: int
    batch: Any
    before: Mapping[str, Any]
    harmless: frozenset[str] = frozenset()


def locate(finding: Finding, evidence: Evidence, plan: Plan, backend: Backend) -> Finding:
    """The finding with the first layer that made NaN or +Inf from an input without; as it was where the replay shows none."""
    if evidence.step != finding.step:
        return finding
    shown: dict[str, Shown] = {**finding.evidence, "batch": evidence.index}
    told = dataclasses.replace(finding, evidence=shown)
    if any(name.split(".")[0] in ("input", "label") for name in finding.subjects):
        return told
    for layer in backend.replay(plan, evidence.batch, evidence.before):
        if layer.name in evidence.harmless:
            continue
        if not layer.clean_weights:
            return dataclasses.replace(told, evidence={**shown, "weights": f"{layer.name} held non-finite weights before this step"})
        if layer.clean_input and not layer.clean_output:
            fed = "an input of -Inf (masks)" if layer.low == -math.inf else f"finite input in [{layer.low:.4g}, {layer.high:.4g}]"
            return dataclasses.replace(
                told,
                subjects=(layer.name,),
                where=layer.name,
                message=f"first non-finite value of the forward pass, made by {layer.name} ({layer.kind}) from {fed}, batch {evidence.index}",
                evidence={**shown, "input_min": layer.low, "input_max": layer.high},
            )
    return told

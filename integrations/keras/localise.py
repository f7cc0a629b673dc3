"""Where a non-finite value was born: the batch of the step is run once more, layer by layer, with the weights from before the update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from trainvet.finding import Evidence as Shown
from trainvet.finding import Finding, Severity
from trainvet.integrations.keras.backend import Backend
from trainvet.integrations.keras.plan import Plan


@dataclasses.dataclass
class Evidence:
    """What is at hand of a bad step: its number, its place in the epoch, the batch, and the variables' values from before it (may be empty)."""

    step: int
    index: int
    batch: Any
    before: Mapping[str, Any]


def locate(finding: Finding, evidence: Evidence, plan: Plan, backend: Backend) -> Finding:
    """The finding with the first layer that made a non-finite output from finite input; as it was where the replay shows none."""
    shown: dict[str, Shown] = {**finding.evidence, "batch": evidence.index}
    told = dataclasses.replace(finding, evidence=shown)
    if finding.severity >= Severity.FATAL or any(name.split(".")[0].startswith(("input", "label")) for name in finding.subjects):
        return told
    for layer in backend.replay(plan, evidence.batch, evidence.before):
        if not layer.finite_weights:
            return dataclasses.replace(told, evidence={**shown, "weights": f"{layer.name} held non-finite weights before this step"})
        if layer.finite_input and not layer.finite_output:
            fed = f"from finite input in [{layer.low:.4g}, {layer.high:.4g}]" if not math.isnan(layer.low) else "from finite input"
            return dataclasses.replace(
                told,
                subjects=(layer.name,),
                where=layer.name,
                message=f"first non-finite value in the forward pass, made by {layer.name} ({layer.kind}) {fed}, batch {evidence.index}",
                evidence={**shown, "input_min": layer.low, "input_max": layer.high},
            )
    return told

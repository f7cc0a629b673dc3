"""WT108: the initial weights shrink or blow up the signal from layer to layer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

HIDDEN = ("relu", "relu6", "leaky_relu", "prelu", "gelu", "silu", "elu", "selu", "tanh", "sigmoid", "softplus", "mish", "hardswish")
SILENT = 0.95  # share of zeros above which a layer is silent, not small
HE = ("relu", "relu6", "leaky_relu", "prelu", "gelu", "silu", "elu", "mish", "hardswish")


@dataclasses.dataclass
class BadlyScaledInitialisation(Rule):
    """
    ## What it checks
    The RMS of the last hidden activation over that of the first one, in the order of the forward pass: outside ``low`` to ``high``, or 0, both on the
    very first sample and on the first one after ``steps`` applied steps.
    ## Why it matters
    A signal that shrinks by a factor per layer carries nothing to the output and no gradient back; one that grows saturates the loss.
    ## What to do
    Give each weight the standard deviation its number of inputs asks for: sqrt(2/n) before ReLU (He), 1/sqrt(n) before tanh (Glorot, LeCun).
    ## Known limits
    Not judged: resumed and pretrained runs, models with fewer than 2 hidden activations, gates, experts and output layers. How gradients fade is
    GR102's. Healthy ratios measured: 0.24 to 4.6.
    """

    code = "WT108"
    reads: ClassVar[frozenset[str]] = frozenset({"activation.rms", "activation.zero_share", "weight.std"})
    causes = ("weights initialised with one fixed standard deviation for layers of every width", "a custom initialisation with the wrong fan or gain")
    fixes = ("use He initialisation before ReLU and GELU, Glorot before tanh", "put normalisation layers between")

    low: float = 0.01
    high: float = 100.0
    steps: int = 10

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._start: dict[str, Any] | None = None
        self._first = self._layers = -1
        self._judged = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The layers and their order."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Keep the first sample, and judge it with one after some steps: by then it is known what each layer is."""
        column = snapshot.column("activation.rms")
        if self._judged or column is None:
            return
        if self._start is None:
            stds = snapshot.column("weight.std") or ((), np.empty(0))
            zeros = snapshot.values("activation.zero_share", column[0])
            self._start = {
                "rms": dict(zip(column[0], column[1].tolist(), strict=True)),
                "std": dict(zip(stds[0], stds[1].tolist(), strict=True)),
                "silent": [name for name, zero in zip(column[0], zeros.tolist(), strict=True) if zero >= SILENT],
            }
            self._first, self._judged = snapshot.step, snapshot.applied > 1  # later it is no longer the initialisation that is seen
            return
        if snapshot.applied < self.steps or self._facts.resumed or self._facts.pretrained:
            return
        self._judged = True
        names = self._hidden()
        start, now = self._start["rms"], dict(zip(column[0], column[1].tolist(), strict=True))
        names = [name for name in names if math.isfinite(start.get(name, math.nan)) and math.isfinite(now.get(name, math.nan))]
        self._layers = len(names)
        sides = [self._side([look[name] for name in names]) for look in (start, now)]
        silent = sides[0] == "low" and not set(names).isdisjoint(self._start["silent"])  # units that do not fire are no matter of scale
        if sides[0] and sides[0] == sides[1] and not silent:
            yield self._tell(snapshot.step, names, [start[name] for name in names], now[names[-1]] / now[names[0]], sides[0])

    def _hidden(self) -> list[str]:
        sites = self._facts.of("activation").values()
        hidden = [item.name for item in sites if item.function in HIDDEN and item.role not in ("gate", "expert", "output") and item.depth >= 0]
        return list(self._facts.upstream_first(hidden))

    def _side(self, size: list[float]) -> str:
        if len(size) < 2 or not size[0] > 0:
            return ""
        ratio = size[-1] / size[0]
        return "low" if not ratio >= self.low else "high" if not ratio <= self.high else ""

    def _wrong(self, gain: float, side: str) -> tuple[float, str, float, float] | None:
        """The matrix furthest from what its number of inputs asks for: by how much, its name, its standard deviation, the one asked for."""
        found = []
        for name, std in (self._start or {}).get("std", {}).items():
            item = self._facts.parameters.get(name)
            if item is not None and item.is_matrix and item.role != "embedding" and math.isfinite(std):
                fan = math.prod(item.shape[:-1] if self._facts.framework == "keras" else item.shape[1:])
                found.append((std * math.sqrt(fan) / gain, name, std, gain / math.sqrt(max(fan, 1))))
        return (min(found) if side == "low" else max(found)) if found else None

    def _tell(self, step: int, names: list[str], size: list[float], later: float, side: str) -> Finding:
        ratio = size[-1] / size[0]
        steps = [after / before if before > 0 else 1.0 for before, after in itertools.pairwise(size)]
        worst = 1 + int(np.argmin(steps) if side == "low" else np.argmax(steps))
        gain = math.sqrt(2.0) if self._facts.of("activation")[names[0]].function in HE else 1.0
        wrong = self._wrong(gain, side)
        rule = "sqrt(2/fan_in), He" if gain > 1 else "sqrt(1/fan_in), LeCun"
        fix = (
            f"initialise {wrong[1]} and its like with a standard deviation of {wrong[3]:.2g}, {rule} (now {wrong[2]:.2g})" if wrong else self.fixes[0]
        )
        return self.finding(
            step,
            f"the hidden signal {'shrinks' if side == 'low' else 'grows'} to {ratio:.2g} of itself from {names[0]} to {names[-1]} at the start"
            f" (most at {names[worst]})",
            first_step=self._first,
            subjects=[names[worst]],
            evidence={"last over first": ratio, "after some steps": later, "layers": len(names)},
            threshold=f"{self.low:g} to {self.high:g}",
            fixes=(fix, self.fixes[1]),
        )

    def missing(self) -> str:
        """Were the first sample and a later one seen?"""
        if self._facts.resumed or self._facts.pretrained:
            return "not judged: resumed or pretrained"
        if not self._judged:
            return f"a sample after {self.steps} applied steps"
        return "the first step was not sampled" if self._layers < 0 else "fewer than 2 hidden activations were seen" if self._layers < 2 else ""

    def state_dict(self) -> dict[str, Any]:
        """What was seen at the start."""
        return {"start": None if self._judged else self._start, "first": self._first, "judged": self._judged, "layers": self._layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._start, self._first, self._judged, self._layers = state["start"], int(state["first"]), bool(state["judged"]), int(state["layers"])

"""MO106: habits of structure that are seldom meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Layer


@dataclasses.dataclass
class QuestionableStructure(Rule):
    """
    ## What it checks
    In the traced forward: a bias directly in front of a batch normalisation, dropout directly in front of one, and a dropout rate above ``rate``.
    ## Why it matters
    The normalisation takes the bias away again; dropout in front of it makes the statistics of training and evaluation differ; a very
    high rate leaves little to learn from.
    ## What to do
    `bias=False` in front of a normalisation; dropout behind the last one; a rate of at most 0.5.
    ## Known limits
    INFO only: all three train. Only what is directly connected is judged; where the layer graph is not known nothing is said. After NeuraLint's
    rules (Nikanjam and others 2021).
    """

    code = "MO106"
    severity = Severity.INFO
    causes = ("a habit taken over from another architecture",)
    fixes = ("bias=False in front of a normalisation, dropout behind it, a dropout rate of at most 0.5",)

    rate: float = 0.5

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Each kind of habit is told once, with all places that are known then."""
        layers = {layer.name: layer for layer in facts.layers}
        self._known = self._known or bool(layers)
        habits: dict[str, list[str]] = {"a bias in front of a batch normalisation": [], "dropout in front of a batch normalisation": []}
        for layer in layers.values():
            before = [layers[name] for name in layer.after if name in layers]
            if layer.kind == "batch_norm" and len(before) == 1:
                if before[0].bias and before[0].kind in ("linear", "convolution") and not before[0].function:
                    habits["a bias in front of a batch normalisation"].append(before[0].name)
                if before[0].kind == "dropout" and before[0].rate > 0:
                    habits["dropout in front of a batch normalisation"].append(before[0].name)
        habits[f"a dropout rate above {self.rate:g}"] = [layer.name for layer in layers.values() if _drops(layer) > self.rate]
        for habit, names in habits.items():
            if names and habit not in self._told:
                self._told.add(habit)
                yield self.finding(
                    0, habit, subjects=facts.upstream_first(names), evidence={"layers": len(names)}, threshold="none", fixes=(FIX[habit.split()[1]],)
                )

    def missing(self) -> str:
        """Whether the layer graph is known."""
        return "" if self._known else "the layer graph"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])


FIX = {
    "bias": "set bias=False there: the normalisation takes it away again",
    "in": "move the dropout behind the normalisation",
    "dropout": "lower the dropout rate to at most 0.5",
}


def _drops(layer: Layer) -> float:
    return layer.rate if layer.kind == "dropout" else 0.0

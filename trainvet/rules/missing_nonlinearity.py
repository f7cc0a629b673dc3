"""MO107: two linear layers in a row that nothing non-linear separates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Layer

LINEAR = ("linear", "convolution")


@dataclasses.dataclass
class MissingNonlinearity(Rule):
    """
    ## What it checks
    In the traced forward: a linear layer whose input is the output of another one of its kind, with nothing but reshaping or dropout between them.
    ## Why it matters
    Two linear maps in a row are one: the second adds parameters and no ability. A stack without any non-linearity is a linear model.
    ## What to do
    Put an activation between the two, or leave one of them out.
    ## Known limits
    Left alone: factorisations whose inner width is below both outer ones (bottleneck, LoRA), depthwise convolutions followed by pointwise ones,
    frozen layers, an encoder's last and a decoder's first layer around a code that is narrower than both. Where something that is not known lies
    between two layers nothing is said, nor where several layers are given one output, as the projections of an attention are. A sum of other
    things with a layer's output is not followed.
    """

    code = "MO107"
    causes = ("the activation between the two layers was forgotten",)
    fixes = ("put an activation between them, such as ReLU",)

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge the layer graph when it is known; each pair is told once."""
        layers = {layer.name: layer for layer in facts.layers}
        self._known = self._known or bool(layers)
        pairs = []
        given = Counter(name for layer in facts.layers for name in layer.after)
        for layer in layers.values():
            before = _before(layer, layers)
            if before is not None and given[before.name] == 1 and _plain(before, layer) and f"{before.name} > {layer.name}" not in self._told:
                pairs.append((before, layer))
        if not pairs:
            return
        self._told |= {f"{before.name} > {layer.name}" for before, layer in pairs}
        before, layer = pairs[0]
        more = f", and {len(pairs) - 1} more such pairs" if len(pairs) > 1 else ""
        yield self.finding(
            0,
            f"{layer.name} is given the output of {before.name} with no activation between them{more}",
            subjects=facts.upstream_first(dict.fromkeys(before.name for before, _ in pairs)),
            evidence={"pairs": len(pairs), "width": before.width_out},
            threshold="an activation between two linear layers",
            fixes=(f"put an activation behind {before.name}, such as ReLU", f"leave {layer.name} out"),
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


def _before(layer: Layer, layers: Mapping[str, Layer]) -> Layer | None:
    """The linear layer in front, seen through dropout; None where there is none or several."""
    while layer.after and len(layer.after) == 1 and layer.after[0] in layers:
        layer = layers[layer.after[0]]
        if layer.kind != "dropout":
            return layer
    return None


def _plain(before: Layer, layer: Layer) -> bool:
    """Are both linear, of one kind, trained, and no factorisation?"""
    if before.kind not in LINEAR or layer.kind != before.kind or before.function or not (before.trainable and layer.trainable):
        return False
    if before.kind == "convolution" and before.type != layer.type:  # depthwise and pointwise, up and down
        return False
    return before.width_out > 0 and not (before.width_out < before.width_in and before.width_out < layer.width_out)

"""LR104: weight decay on parameters that are usually spared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Optimizer


@dataclasses.dataclass
class DecayedNormParameters(Rule):
    """
    ## What it checks
    Weight decay on gains and biases (one dimension) or embeddings, and L2 added to the gradient of an adaptive optimizer.
    ## Why it matters
    Decay pulls gains towards 0 and embeddings of rare rows too; Adam divides an added L2 by its own average, so that it hardly decays what has large
    gradients.
    ## What to do
    Give these parameters a group with a weight decay of 0, and use AdamW in place of Adam.
    ## Known limits
    Information only: common practice, measured to matter little in small models. Silent where the decayed parameters are not known.
    """

    code = "LR104"
    severity = Severity.INFO
    causes = ("one parameter group for all parameters", "Adam with weight_decay, where AdamW was meant")
    fixes = ("give gains, biases and embeddings a group of their own with weight_decay=0", "use AdamW with the same weight_decay")

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge each optimizer once."""
        self._known = bool(facts.optimizers)
        for item in facts.optimizers:
            if item.weight_decay > 0 and item.name not in self._told:
                found = list(self._judge(facts, item))
                if found:
                    self._told.add(item.name)
                yield from found

    def _judge(self, facts: Facts, item: Optimizer) -> Iterable[Finding]:
        parameters = facts.parameters
        held = [parameters[name] for name in item.decayed if name in parameters and parameters[name].trainable]
        spared = [subject.name for subject in held if len(subject.shape) == 1 or subject.role in ("norm", "bias", "bias-before-norm", "embedding")]
        if spared:
            yield self._tell(item, f"weight decay {item.weight_decay:g} also acts on {len(spared)} gains, biases or embeddings",
                             facts.upstream_first(spared), 0)  # fmt: skip
        elif item.coupled_decay and item.family == "adam":
            yield self._tell(
                item, f"{item.type or 'the adaptive optimizer'} adds a weight decay of {item.weight_decay:g} to the gradient (L2)", (), 1
            )

    def _tell(self, item: Optimizer, message: str, names: tuple[str, ...], cause: int) -> Finding:
        return self.finding(
            0,
            message,
            subjects=names,
            where="" if names else item.name,
            evidence={"weight decay": item.weight_decay, "parameters": len(names)},
            threshold="a weight decay of 0 on them" if names else "a decay taken from the weights (AdamW)",
            causes=(self.causes[cause],),
            fixes=(self.fixes[cause],),
        )

    def missing(self) -> str:
        """Without an optimizer there is nothing to judge."""
        return "" if self._known else "no optimizer is known"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])

"""MO102: modules or parameters that are shared, and ties that are broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts


@dataclasses.dataclass
class UnexpectedlyShared(Rule):
    """
    ## What it checks
    Ties that the model declares and whose weights are two: an error. One module object that is called under several names: a warning where it owns
    trainable parameters. Parameters known under several names: information.
    ## Why it matters
    `[layer] * 6` and a default argument that is a module make one layer of what was meant to be six. A tie that is broken by loading, copying
    or moving leaves an output embedding that nobody trains as meant.
    ## What to do
    Build each layer anew: `[make() for _ in range(6)]`. Tie weights again after loading.
    ## Known limits
    Layers that are shared on purpose (ALBERT, siamese branches under two names) look the same: mute them. Ties are known where the model
    declares them (`_tied_weights_keys`).
    """

    code = "MO102"
    severity = Severity.ERROR
    causes = ("a list of one layer repeated: [layer] * n", "one module object is handed to several parents")
    fixes = ("build each layer anew: [make() for _ in range(n)]", "mute this finding if the sharing is meant")

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Each sharing is told once."""
        self._known = bool(facts.subjects)
        broken = [pair for pair in facts.broken_ties if pair not in self._told]
        if broken:
            yield self.finding(
                0,
                f"{broken[0].replace(' = ', ' and ')} are declared to be one and are two",
                subjects=tuple(pair.partition(" = ")[0] for pair in broken),
                evidence={"ties": ", ".join(broken[:4])},
                threshold="declared ties share their memory",
                causes=("weights were loaded, copied or replaced after they had been tied",),
                fixes=("tie them again before training: model.tie_weights()",),
            )
        shared = [pair for pair in facts.shared_modules if pair not in self._told]
        if shared:
            yield self.finding(
                0,
                f"one module under several names: {shared[0]}" + (f" and {len(shared) - 1} more" if len(shared) > 1 else ""),
                subjects=tuple(pair.partition(" = ")[0] for pair in shared),
                severity=Severity.WARNING,
                evidence={"modules": ", ".join(shared[:4])},
                threshold="each name a module of its own",
            )
        tied = {name: subject.tied_to for name, subject in facts.parameters.items() if subject.tied_to and name not in self._told}
        if tied:
            name, other = next(iter(tied.items()))
            yield self.finding(
                0,
                f"{name} and {other} are one parameter" + (f", and {len(tied) - 1} more ties" if len(tied) > 1 else ""),
                subjects=tuple(tied),
                severity=Severity.INFO,
                evidence={"ties": len(tied)},
                threshold="listed for information",
                causes=("weights that are tied on purpose, such as input and output embeddings",),
                fixes=("nothing, if it is meant",),
            )
        self._told |= {*broken, *shared, *tied}

    def missing(self) -> str:
        """Whether the model is known."""
        return "" if self._known else "the model"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])

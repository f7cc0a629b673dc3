"""WT102: a trainable parameter that no optimizer holds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.copies import repeats
from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts


@dataclasses.dataclass
class ParameterWithoutOptimizer(Rule):
    """
    ## What it checks
    Every parameter that requires a gradient belongs to some optimizer, and every tensor in an optimizer belongs to the model.
    ## Why it matters
    Such a parameter is differentiated and never moved. Its gradient is not cleared either, so that it grows and looks like an explosion.
    ## What to do
    Hand the parameter to the optimizer, or freeze it so that the intention shows (``requires_grad = False``, ``trainable = False``).
    ## Known limits
    INFO only for whole modules that repeat a trained one (teacher, target network), for whole modules left out of a model that was loaded (linear
    probing), and for extra tensors in an optimizer that holds all of the model. Silent where no optimizer is known.
    """

    code = "WT102"
    severity = Severity.ERROR
    causes = ("the optimizer was built from a part of the model", "a module was added or replaced after the optimizer had been built")
    fixes = ("hand them to the optimizer: build it from all of the model's parameters, or add a group", "freeze them if they are not to be trained")

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge the plan; of a changed plan only what is new is told."""
        foreign = {f"optimizer:{item.name}": item.unknown_parameters for item in facts.optimizers if item.unknown_parameters}
        self._known = bool(facts.owned or foreign)
        if not self._known:
            return
        trainable = {name: subject.shape for name, subject in facts.parameters.items() if subject.trainable}
        missing = [name for name in trainable if name not in facts.owned]
        groups = together(missing, list(trainable))
        held = {name: shape for name, shape in trainable.items() if name in facts.owned}
        meant = {
            place for place, names in groups.items() if place not in ("", *names) and (facts.pretrained or repeats(place, names, trainable, held))
        }
        fresh = {place: [name for name in names if name not in self._told] for place, names in groups.items()}
        for severity in (Severity.ERROR, Severity.INFO):
            chosen = {place: names for place, names in fresh.items() if names and (place in meant) == (severity is Severity.INFO)}
            if chosen:
                yield self._missing(facts, severity, chosen, len(trainable), self.causes[:: -1 if foreign else 1])
        for key, count in foreign.items():
            if key not in self._told:
                yield self._foreign(key.partition(":")[2], count, bool(missing))
        self._told = {*missing, *foreign}

    def _missing(self, facts: Facts, severity: Severity, groups: Mapping[str, list[str]], trainable: int, causes: tuple[str, ...]) -> Finding:
        names = facts.upstream_first(name for chosen in groups.values() for name in chosen)
        shown = [place_of(place, groups[place]) for place in sorted(groups, key=lambda place: names.index(groups[place][0]))]
        places = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        meant = severity is Severity.INFO
        return self.finding(
            0,
            f"{len(names)} of {trainable} trainable parameters belong to no optimizer and will never move",
            subjects=names,
            where=places,
            severity=severity,
            evidence={"parameters": len(names), "trainable": trainable},
            threshold="every trainable parameter in an optimizer",
            causes=("a teacher, a target network or a loaded backbone that is meant to stand still",) if meant else causes,
            fixes=("freeze it (requires_grad = False), so that no gradients are computed for it",) if meant else None,
        )

    def _foreign(self, optimizer: str, count: int, missing: bool) -> Finding:
        return self.finding(
            0,
            f"{count} tensors in the optimizer are not parameters of the model",
            where=optimizer,
            severity=Severity.ERROR if missing else Severity.INFO,
            evidence={"tensors": count},
            threshold="every tensor in the optimizer a parameter of the model",
            causes=("the model was replaced, wrapped or re-flattened after the optimizer had been built", "parameters of a loss or of another model"),
            fixes=("build the optimizer last, from the model that is trained",),
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


def together(missing: list[str], trainable: list[str]) -> dict[str, list[str]]:
    """``missing`` by the outermost module all of whose trainable parameters are missing ("" = the whole model), else by their own names."""
    total = Counter(prefix for name in trainable for prefix in prefixes(name))
    lost = Counter(prefix for name in missing for prefix in prefixes(name))
    groups: dict[str, list[str]] = {}
    for name in missing:
        groups.setdefault(next((prefix for prefix in prefixes(name) if lost[prefix] == total[prefix]), name), []).append(name)
    return groups


def prefixes(name: str) -> list[str]:
    """ "a.b.weight" -> ["", "a", "a.b"]."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def place_of(place: str, names: list[str]) -> str:
    """ "backbone (4 parameters: backbone.0.weight, …)", or the name of a single parameter."""
    if names == [place]:
        return place
    more = ", …" if len(names) > 1 else ""
    return f"{place or 'the whole model'} ({len(names)} parameters: {names[0]}{more})"

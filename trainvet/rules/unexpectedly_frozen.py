"""MO101: modules that do not train, for no reason that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.copies import repeats
from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UnexpectedlyFrozen(Rule):
    """
    ## What it checks
    Parameters that require no gradient. A warning where whole modules are frozen with the random weights they were built with, the optimizer holds
    them all the same, and no finetuning callback explains it; and where the running statistics of a frozen normalisation change on ``patience``
    samples. Information otherwise, also when parameters freeze during the run.
    ## Why it matters
    A frozen module with random weights passes noise on. A frozen backbone whose running statistics drift is not the one that was loaded.
    ## What to do
    Thaw it (`requires_grad_(True)`, `trainable = True`), or load its weights first; put frozen normalisation into evaluation mode.
    ## Known limits
    Random features, target networks and teachers are frozen on purpose: a module that repeats a trained one is left alone, others are to be muted.
    Frozen layers whose weights are not those of a default initialisation, and low-rank additions to a frozen layer, are information. In Keras,
    where an optimizer holds no frozen layer, all of it is information.
    """

    code = "MO101"
    reads: ClassVar[frozenset[str]] = frozenset({"buffer.changed"})
    causes = ("requires_grad or trainable was switched off and not on again", "the wrong part of the model was frozen")
    fixes = ("thaw it: module.requires_grad_(True), in Keras layer.trainable = True before compile", "load the weights it is meant to keep")

    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._told: set[str] = set()
        self._free: set[str] | None = None
        self._moved: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self._still: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge the plan; each module is told once."""
        self._facts = facts
        parameters = facts.parameters
        self._homes = {name: subject.module for name, subject in facts.of("buffer").items()}
        live = {subject.module for subject in parameters.values() if subject.trainable}
        self._still = {subject.module for subject in parameters.values()} - live
        frozen = [name for name, subject in parameters.items() if not subject.trainable]
        free = {name for name, subject in parameters.items() if subject.trainable}
        later = [name for name in frozen if self._free is not None and name in self._free]
        self._free = free if parameters else None
        whole = {place: names for place, names in frozen_modules(frozen, free).items() if place not in self._told}
        meant = facts.pretrained or facts.resumed or facts.finetuning or bool(later)
        shapes = {name: subject.shape for name, subject in parameters.items()}
        held = {name: shapes[name] for name in free}
        for place, names in list(whole.items()):
            if repeats(place, names, shapes, held):
                del whole[place]
        if not whole or not free:
            return
        self._told |= set(whole)
        given = bool({name for names in whole.values() for name in names} & facts.owned)
        random = any(f"{name}.".startswith(f"{place}.") for place in whole for name in facts.initial)
        meant = meant or not given or not random or all(self._adapted(place) for place in whole)
        count = sum(parameters[name].numel for names in whole.values() for name in names)
        share = count / sum(subject.numel for subject in parameters.values())
        yield self.finding(
            0,
            f"{', '.join(list(whole)[:3])} {'are' if len(whole) > 1 else 'is'} frozen: {share:.0%} of all weights do not train",
            subjects=tuple(whole),
            severity=Severity.INFO if meant else Severity.WARNING,
            evidence={"frozen parameters": sum(map(len, whole.values())), "share of weights": share},
            threshold="whole modules that hold their initial random weights",
            fixes=(f"thaw it: requires_grad_(True) on {next(iter(whole))}, in Keras trainable = True before compile", self.fixes[1]),
        )

    def _adapted(self, place: str) -> bool:
        """Does the module right around it train parameters of its own (a low-rank addition to a frozen layer)?"""
        around = place.rpartition(".")[0]
        return any(subject.trainable and subject.module == around for subject in self._facts.parameters.values())

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Running statistics of frozen normalisations."""
        column = snapshot.column("buffer.changed")
        if column is None:
            return
        due = []
        for index in np.flatnonzero(column[1] > 0).tolist():
            name = column[0][index]
            module = self._homes.get(name) or name.rpartition(".")[0]
            if module not in self._still or name.endswith("num_batches_tracked"):
                continue
            self._moved[module] = self._moved.get(module, 0) + 1
            if self._moved[module] >= self.patience and f"statistics {module}" not in self._told:
                due.append(module)
        due = list(dict.fromkeys(due))
        if due:
            self._told |= {f"statistics {module}" for module in due}
            yield self.finding(
                snapshot.step,
                f"the running statistics of frozen {due[0]} change" + (f", and of {len(due) - 1} more" if len(due) > 1 else ""),
                first_step=0,
                subjects=self._facts.upstream_first(due),
                severity=Severity.WARNING,
                evidence={"layers": len(due)},
                threshold=f"unchanged statistics in frozen layers, {self.patience} samples",
                causes=("a frozen normalisation layer is left in training mode",),
                fixes=("put the frozen part into evaluation mode: module.eval(), in Keras call it with training=False",),
            )

    def missing(self) -> str:
        """Whether the parameters are known."""
        return "" if self._facts.parameters else "the model's parameters"

    def state_dict(self) -> dict[str, Any]:
        """What was told and which parameters trained."""
        return {"told": sorted(self._told), "free": None if self._free is None else sorted(self._free), "moved": dict(self._moved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])
        self._free = None if state["free"] is None else set(state["free"])
        self._moved = {str(name): int(count) for name, count in state["moved"].items()}


def frozen_modules(frozen: Iterable[str], free: Iterable[str]) -> dict[str, list[str]]:
    """The outermost modules all of whose parameters are frozen, with these parameters; single parameters of a module that trains are left out."""
    alive = {".".join(name.split(".")[:length]) for name in free for length in range(name.count(".") + 1)}
    found: dict[str, list[str]] = {}
    for name in frozen:
        parts = name.split(".")
        place = next((".".join(parts[:length]) for length in range(1, len(parts)) if ".".join(parts[:length]) not in alive), "")
        if place:
            found.setdefault(place, []).append(name)
    return found

"""AC104: a module gives nothing but zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Subject

UNITS = 8  # a layer of fewer units may be silent for some batches
DROPPED = ("drop", "mask", "pad", "expert", "identity", "loss")


@dataclasses.dataclass
class AllZeroOutput(Rule):
    """
    ## What it checks
    Every element of a module's output is exactly 0 on ``patience`` samples in a row, from applied step ``after`` on. An error where the gradients of
    all the module's own parameters are 0 as well.
    ## Why it matters
    What comes behind it sees nothing of the input, and what lies before it gets no gradient through it.
    ## What to do
    Look at the weights of the module and at what enters it: a zero initialisation that cannot leave zero, a dead ReLU, a mask that covers everything.
    ## Known limits
    Residual branches that start at 0 have left it by then. Not judged: dropped paths, masks, gates and experts (by role or by name), modules whose
    parameters are all frozen, and outputs of fewer than 8 units.
    """

    code = "AC104"
    reads: ClassVar[frozenset[str]] = frozenset({"activation.abs_max", "gradient.abs_max"})
    causes = (
        "weights and bias of the module are 0 and cannot leave it",
        "every unit of the activation in front of it or in it is dead",
        "a mask or a factor of 0 covers the whole output",
    )
    fixes = (
        "initialise the module's weights with the framework's default, not with zeros",
        "lower the learning rate if the units died during training",
        "look at the mask or factor that is multiplied onto its output",
    )

    patience: int = 5
    after: int = 10

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._own: dict[str, tuple[str, ...]] = {}
        self._streak = Streak(self.patience)
        self._calm = PerSubject(count=0.0)  # an output that flickers is one episode
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which outputs are judged, and what parameters their modules own."""
        self._facts = facts
        sites = {name: item for name, item in facts.of("activation").items() if self._counts(item)}
        inside: dict[str, list[Subject]] = {}
        for other in facts.parameters.values():
            parts = other.module.split(".")
            for count in range(1, len(parts) + 1):
                inside.setdefault(".".join(parts[:count]), []).append(other)
        self._own = {}
        for name, item in sites.items():
            mine = inside.get(item.module, []) if item.module and item.module_type != "function" else []
            if not mine or any(other.trainable for other in mine):
                self._own[name] = tuple(other.name for other in mine if other.trainable)
        self._rows.choose(self._own)
        return ()

    @staticmethod
    def _counts(item: Subject) -> bool:
        named = f"{item.name} {item.module_type}".lower()
        wide = len(item.shape) > 1 and item.numel >= UNITS * max(item.shape[0], 1)
        return wide and item.role not in ("gate", "expert") and not any(word in named for word in DROPPED)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count the samples on which an output was 0 throughout."""
        column = snapshot.column("activation.abs_max")
        if column is None or not self._rows.find(column[0]):
            return
        self._samples += 1
        names = self._rows.names
        zero = self._rows.values(snapshot, "activation.abs_max") == 0
        if snapshot.applied < self.after:
            self._streak.update(names, np.zeros(len(names), dtype=bool), snapshot.step)
            return
        rows = self._calm.rows(names)
        self._calm["count"][rows] = calm = np.where(zero, 0.0, self._calm["count"][rows] + 1)
        due = [names[row] for row in self._streak.update(names, zero, snapshot.step, clear=calm >= self.patience)]
        for severity in (Severity.ERROR, Severity.WARNING) if due else ():
            chosen = self._facts.upstream_first(name for name in due if self._cut_off(snapshot, name) == (severity is Severity.ERROR))
            if chosen:
                yield self._tell(snapshot, chosen, severity)

    def _cut_off(self, snapshot: Snapshot, name: str) -> bool:
        own = self._own[name]
        return bool(own) and bool((snapshot.values("gradient.abs_max", own) == 0).all())

    def _tell(self, snapshot: Snapshot, names: tuple[str, ...], severity: Severity) -> Finding:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        own = bool(self._own[names[0]])
        return self.finding(
            snapshot.step,
            f"the output of {names[0]}{more} is exactly 0 on {self.patience} samples in a row"
            + (", and so are the gradients of its parameters" if severity is Severity.ERROR else ""),
            first_step=min(self._streak.first(name) for name in names),
            subjects=names,
            severity=severity,
            evidence={"modules": len(names)},
            threshold=f"{self.patience} samples in a row from step {self.after} on",
            causes=self.causes if own else self.causes[1:],
            fixes=self.fixes if own else self.fixes[1:],
        )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"streak": self._streak.state_dict(), "calm": self._calm.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state["streak"])
        self._calm.load_state_dict(state["calm"])
        self._samples = int(state["samples"])

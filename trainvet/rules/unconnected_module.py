"""MO103: a module with trainable parameters that the forward never calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UnconnectedModule(Rule):
    """
    ## What it checks
    A module that owns trainable parameters was not called in any of ``samples`` sampled training steps.
    ## Why it matters
    It is carried along, saved and counted, and does nothing: a layer that was built and forgotten in `forward`, or replaced under another name.
    ## What to do
    Call it, or remove it.
    ## Known limits
    Modules that are called on some steps only (conditional computation, experts, layer drop) need many samples before one is met: a module beside
    siblings of its own kind of which others are called is left alone. A module whose parameters are used without calling it is no case of this.
    """

    code = "MO103"
    reads: ClassVar[frozenset[str]] = frozenset({"module.called"})
    causes = ("a layer was built and is not used in the forward", "the layer was replaced by another one and stayed behind")
    fixes = ("call the module in the forward, or remove it",)

    samples: int = 20

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._kept = PerSubject(samples=0.0, called=0.0, told=0.0)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which modules train."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count samples and calls."""
        column = snapshot.column("module.called")
        if column is None:
            return
        names, called = column
        rows = self._kept.rows(names)
        self._kept["samples"][rows] += 1
        self._kept["called"][rows] += np.where(called > 0, called, 0.0)
        samples, total, told = (self._kept[key][rows] for key in ("samples", "called", "told"))
        due = (samples >= self.samples) & (total == 0) & (told == 0)
        if not due.any() or not (total > 0).any():
            return
        self._kept["told"][rows] = np.where(due, 1.0, told)
        modules = self._facts.of("module")
        alive = {kin(name) for name, count in zip(names, total.tolist(), strict=True) if count > 0}
        idle = [
            names[row]
            for row in np.flatnonzero(due).tolist()
            if names[row] in modules and modules[names[row]].trainable and (kin(names[row]) not in alive or kin(names[row]) == names[row])
        ]
        if idle:
            yield self.finding(
                snapshot.step,
                f"{len(idle)} module{'s'[: len(idle) > 1]} with trainable parameters {'were' if len(idle) > 1 else 'was'} never called",
                first_step=0,
                subjects=self._facts.upstream_first(idle),
                evidence={"modules": len(idle), "samples": self.samples},
                threshold=f"no call in {self.samples} sampled steps",
            )

    def missing(self) -> str:
        """How many samples there were."""
        seen = int(self._kept["samples"].max()) if self._kept.names else 0
        return "" if seen >= self.samples else f"{seen} of {self.samples} samples"

    def state_dict(self) -> dict[str, Any]:
        """Counts per module."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state)


def kin(name: str) -> str:
    """The name with every number in it hidden: "experts.3.up" and "experts.5.up" are of one kind."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))

"""MO105: data-parallel processes hold different weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class DriftingReplicas(Rule):
    """
    ## What it checks
    A checksum of all parameters is equal on all data-parallel processes. Any difference above ``allowed`` is told.
    ## Why it matters
    Each process then trains a model of its own, and what is saved is one of them.
    ## What to do
    Look for parameters that are left out of the gradient exchange, weights that are changed outside the optimizer, and modules whose random numbers
    differ between processes at the start.
    ## Known limits
    Compared rarely, since it takes one exchange between the processes. Sharded parameters differ by design and are not compared. With one process
    there is nothing to compare.
    """

    code = "MO105"
    reads: ClassVar[frozenset[str]] = frozenset({"run.replica_difference"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("a parameter is left out of the gradient exchange", "weights are changed outside the optimizer, differently on each process")
    fixes = ("wrap the whole model for data-parallel training, after all of its parameters exist", "change weights on all processes alike")

    allowed: float = 0.0

    def __post_init__(self) -> None:
        self._seen = 0
        self._good = -1
        self._told = False

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Every comparison."""
        for name, track in snapshot.tracks("run.replica_difference").items():
            for step, value in zip(track.steps.tolist(), track.values.tolist(), strict=True):
                self._seen += 1
                if value <= self.allowed:
                    self._good, self._told = step, False
                elif not self._told:
                    self._told = True
                    yield self.finding(
                        step,
                        f"the weights of the processes differ: their checksums by {value:.3g}",
                        first_step=self._good + 1,
                        where="" if name == "run" else name,
                        evidence={"difference": value, "last equal step": self._good},
                        threshold=f"a difference above {self.allowed:g}",
                    )

    def missing(self) -> str:
        """Whether there was a comparison."""
        return "" if self._seen else "a comparison of the processes"

    def state_dict(self) -> dict[str, Any]:
        """The last step at which all were equal."""
        return {"seen": self._seen, "good": self._good, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen, self._good, self._told = int(state["seen"]), int(state["good"]), bool(state["told"])

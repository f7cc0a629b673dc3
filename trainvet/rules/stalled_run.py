"""RN102: a run that stands still."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class StalledRun(Rule):
    """
    ## What it checks
    No step for ``seconds``. While the run stands, the callback's watchdog logs a warning and writes the stacks of all threads to a file beside the
    run's other files; when the run goes on, or ends, the same is a finding here.
    ## Why it matters
    A run that waits for a data loader, a lock, a file system or another process holds its machine, and nothing else says so.
    ## What to do
    Read where the training thread stands, and look at what it waits for: a worker of the data loader, a collective call, a slow disk.
    ## Known limits
    Batches of an evaluation and checkpoints count as life, as far as the trainer tells of them. A single step that takes longer is told too. What a
    worker process does is not seen, only that it is waited for.
    """

    code = "RN102"
    reads: ClassVar[frozenset[str]] = frozenset({"run.step_seconds"})
    causes = ("the data loader, or one of its workers, is stuck", "another process, a lock or a file system is waited for")
    fixes = ("look at the stacks in the file named", "give the data loader a timeout: DataLoader(timeout=60)")

    seconds: float = 1800.0

    def __post_init__(self) -> None:
        self._told = -1
        self._seen = 0

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Steps that took that long although nobody was watching (a recorded run)."""
        for track in snapshot.tracks("run.step_seconds").values():
            self._seen += len(track.steps)
            for step, value in zip(track.steps.tolist(), track.values.tolist(), strict=True):
                if value >= self.seconds > 0 and step != self._told:
                    yield self.stalled(step, value, "", "")

    def stalled(self, step: int, stood: float, place: str, path: str) -> Finding:
        """What the watchdog saw before ``step``: seconds, the innermost calls of the training thread, the file with all stacks."""
        self._told = step
        at = f"; it stood at {place}" if place else ""
        evidence: dict[str, float | int | str | bool] = {"seconds": stood}
        evidence |= {"stands at": place} if place else {}
        evidence |= {"stacks": path} if path else {}
        return self.finding(step, f"no step for {stood:.4g} s{at}", evidence=evidence, threshold=f"{self.seconds:g} s without a step")

    def validate(self) -> None:
        """Raise ValueError for a time that cannot be waited."""
        super().validate()
        if self.seconds <= 0:
            raise ValueError(f"{self.name}: setting seconds={self.seconds!r} must be above 0")

    def missing(self) -> str:
        """Whether any step was timed."""
        return "" if self._seen or self._told >= 0 else "a step that was timed"

    def state_dict(self) -> dict[str, Any]:
        """The last step told of."""
        return {"told": self._told, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._seen = int(state["told"]), int(state["seen"])

"""RN103: steps wait for data, or some take far longer than the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

SPAN, START = 200, 20


@dataclasses.dataclass
class InputBoundRun(Rule):
    """
    ## What it checks
    In a stretch of 200 steps: more than ``share`` of the time was spent waiting for the next batch; or ``outliers`` steps took longer than the
    median by more than ``deviations`` median absolute deviations and by ``pause`` seconds, and twice as long. Information.
    ## Why it matters
    The device stands still while it waits: the run takes longer than it must.
    ## What to do
    Load in more processes, prepare batches ahead, keep decoded data. For outliers look at what happens at those steps: checkpoints, logging,
    memory.
    ## Known limits
    Speed only, never more than information: tiny models wait for data and train well. The first 20 steps (compilation, start of workers) do not
    count. Slow steps of a run of very short ones are only told where each costs more than ``pause``: less is what the machine itself adds.
    """

    code = "RN103"
    reads: ClassVar[frozenset[str]] = frozenset({"run.step_seconds", "run.wait_seconds"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("data are loaded or prepared too slowly", "work besides training: logging, checkpoints, memory that runs short")
    fixes = ("load data in more processes (num_workers) and ahead of time (prefetch)", "look at what is done at the slow steps")

    share: float = 0.2
    outliers: int = 10
    deviations: float = 6.0
    pause: float = 0.05

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._time = Rollings(SPAN, waits=False, slow=False)
        self._wait = Rollings(SPAN)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The framework is named in the advice."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every 200 steps."""
        for _ in self._wait.add(snapshot, "run.wait_seconds", skipped=True):
            pass
        for name, rows, fresh in self._time.add(snapshot, "run.step_seconds", skipped=True):
            for end in rows.windows(fresh, SPAN):
                yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        keep = START if rows.total(end) == SPAN else 0
        steps, values = rows.steps[end - SPAN + keep : end], rows.values[end - SPAN + keep : end]
        first, step, total = int(steps[0]), int(steps[-1]), float(values.sum())
        waited = next((float(wait.values[np.isin(wait.steps, steps)].sum()) for wait in self._wait.all()), 0.0)
        if not total > 0 or not np.isfinite(total):
            return
        waits = waited / total > self.share
        middle = median(values)
        limit = max(middle + self.deviations * median(np.abs(values - middle)), middle + self.pause, 2 * middle)  # below: the machine's own jitter
        slow = int((values > limit).sum())
        if waits and not rows.kept["waits"]:
            keras = self._facts.framework == "keras"
            fix = (
                "use dataset.prefetch(tf.data.AUTOTUNE) and map with num_parallel_calls"
                if keras
                else "give the DataLoader more num_workers, and pin_memory"
            )
            message = f"{waited / total:.0%} of the time of {len(values)} steps was spent waiting for data"
            yield self._found(name, step, first, message, {"waiting": waited, "seconds": total}, f"{self.share:.0%} of the time", 0, fix)
        if slow >= self.outliers and not rows.kept["slow"]:
            message = f"{slow} of {len(values)} steps took longer than {limit:.3g} s, where {middle:.3g} s is usual"
            evidence = {"slow steps": slow, "usual seconds": middle, "longest seconds": float(values.max())}
            threshold = f"{self.outliers} steps above the median by {self.deviations:g} deviations and {self.pause:g} s, and twice as long"
            yield self._found(name, step, first, message, evidence, threshold, 1, self.fixes[1])
        rows.kept.update(waits=waits, slow=slow >= self.outliers)

    def _found(self, name: str, step: int, first: int, message: str, evidence: Mapping[str, float], threshold: str, cause: int, fix: str) -> Finding:
        return self.finding(
            step, message, first_step=first, where=name, evidence=evidence, threshold=threshold, causes=(self.causes[cause],), fixes=(fix,)
        )

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._time.longest >= SPAN else f"{self._time.longest} of {SPAN} steps"

    def state_dict(self) -> dict[str, Any]:
        """The last times."""
        return {"time": self._time.state_dict(), "wait": self._wait.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._time.load_state_dict(state["time"])
        self._wait.load_state_dict(state["wait"])

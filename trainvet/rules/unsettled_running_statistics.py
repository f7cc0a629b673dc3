"""MO109: an evaluation uses running statistics that have hardly left their initial values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class UnsettledRunningStatistics(Rule):
    """
    ## What it checks
    For each batch normalisation, when an evaluation really runs: the share of the initial mean 0 and variance 1 that is still in its running
    statistics, momentum to the power of updates so far. Above ``share`` in two evaluations in a row, or in the last one, it is a warning; a first
    evaluation alone is information, and so are early ones where the planned steps leave less than ``share`` at the pace so far.
    ## Why it matters
    Evaluation then normalises with numbers that are not those of the data: training looks good and validation bad, for a reason that more
    training or regularisation does not touch. Keras keeps 0.99 at each update: 300 updates leave 5 %.
    ## What to do
    A lower momentum (Keras 0.9; PyTorch 0.1 means the same), more steps before the evaluation counts, or a few passes in training mode without
    updates of the weights.
    ## Known limits
    Layers whose statistics were loaded or are frozen are not judged; evaluation in training mode does not use them.
    """

    code = "MO109"
    reads: ClassVar[frozenset[str]] = frozenset({"validation_module.unsettled"})
    causes = ("the run has too few updates for the momentum of its batch normalisation",)
    fixes = ("lower the momentum of the running statistics so that they forget their start (Keras: momentum=0.9)",)

    share: float = 0.05

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._kept = PerSubject(count=0.0, last=0.0, first=-1.0, told=0.0)
        self._step = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Loaded statistics are settled."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """One evaluation."""
        column = snapshot.column("validation_module.unsettled")
        if column is None or self._facts.pretrained or self._facts.resumed:
            return
        names, left = column
        rows = self._kept.rows(names)
        over = left > self.share
        count = np.where(over, self._kept["count"][rows] + 1, 0.0)
        self._kept["first"][rows] = np.where(count == 1, snapshot.step, self._kept["first"][rows])
        self._kept["count"][rows], self._kept["last"][rows], self._step = count, left, snapshot.step
        told = self._kept["told"][rows]
        planned = self._facts.planned_steps
        # momentum to the power of updates: what is left at the end is a power of what is left now
        lasting = over if planned is None else np.clip(left, 0.0, 1.0) ** max(1.0, planned / (snapshot.step + 1)) > self.share
        for level, due in ((2.0, (count >= 2) & lasting & (told < 2)), (1.0, (count == 1) & (told < 1))):
            chosen = np.flatnonzero(due).tolist()
            if chosen:
                self._kept["told"][rows] = np.where(due, level, self._kept["told"][rows])
                severity = Severity.WARNING if level > 1 else Severity.INFO
                yield self._tell(snapshot.step, [names[row] for row in chosen], float(left[chosen].max()), severity)

    def end(self, step: int) -> Iterable[Finding]:
        """The last evaluation counts by itself."""
        due = (self._kept["count"] >= 1) & (self._kept["told"] < 2)
        chosen = [name for name, is_due in zip(self._kept.names, due.tolist(), strict=True) if is_due]
        if chosen:
            yield self._tell(self._step, chosen, float(self._kept["last"][due].max()), Severity.WARNING)

    def _tell(self, step: int, names: list[str], left: float, severity: Severity) -> Finding:
        first = min(int(self._kept["first"][self._kept.row(name)]) for name in names)
        return self.finding(
            step,
            f"an evaluation normalises with statistics that are {left:.0%} their initial values",
            first_step=max(0, min(first, step)),
            subjects=self._facts.upstream_first(names),
            severity=severity,
            evidence={"initial share": left, "layers": len(names)},
            threshold=f"{self.share:.0%} in two evaluations in a row or in the last one",
        )

    def missing(self) -> str:
        """Whether an evaluation was seen."""
        if self._facts.pretrained or self._facts.resumed:
            return "not judged: statistics were loaded"
        return "" if self._kept.names else "an evaluation with a batch normalisation in evaluation mode"

    def state_dict(self) -> dict[str, Any]:
        """Evaluations in a row, per layer."""
        return {"kept": self._kept.state_dict(), "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._step = int(state["step"])

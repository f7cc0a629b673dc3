"""LO106: the loss goes up and down from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

WINDOW = 64
ROUNDING = 1e-16
TIME = np.linspace(-1.0, 1.0, WINDOW)


@dataclasses.dataclass
class OscillatingLoss(Rule):
    """
    ## What it checks
    The correlation of neighbouring losses among 64, after their straight line was taken away, lies below minus ``correlation`` in two of the last
    three such windows (four standard deviations for independent noise). Information.
    ## Why it matters
    Steps across a valley instead of along it: the rate is at the edge of what the curvature allows.
    ## What to do
    Lower the learning rate if the loss does not fall as it should.
    ## Known limits
    Information only: full-batch descent above its stable rate did not show it, and healthy training at the edge of stability may. Two batches in
    turn, or data that alternate, look the same. The first 64 steps are left out.
    """

    code = "LO106"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("learning rate at the edge of stability", "batches that alternate between two kinds of data")
    fixes = ("lower the learning rate", "shuffle the data")

    correlation: float = 0.5

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._loss = Rollings(WINDOW, last=[], told=False)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The groups' rates are named in the advice."""
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every window of 64 rows but the first."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            for end in rows.windows(fresh, WINDOW):
                if rows.total(end) > WINDOW:
                    yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        values, kept = rows.values[end - WINDOW : end], rows.kept
        with np.errstate(all="ignore"):
            scaled = values / np.abs(values).max()
            apart = scaled - scaled.mean()
            apart = apart - TIME * float(apart @ TIME) / float(TIME @ TIME)
            square = float(apart @ apart)
            follow = float(apart[1:] @ apart[:-1]) / square if square > ROUNDING else np.nan
        first, step = int(rows.steps[end - WINDOW]), int(rows.steps[end - 1])
        kept["last"] = [*kept["last"][-2:], [bool(follow < -self.correlation), first]]
        below = [since for low, since in kept["last"] if low]
        if len(below) < 2:
            kept["told"] = kept["told"] and bool(below)
            return
        if not kept["told"]:
            kept["told"] = True
            yield self.finding(
                step,
                f"the loss goes up and down from step to step (correlation of neighbours {follow:.2f})",
                first_step=below[0],
                where=name,
                evidence={"correlation": follow},
                threshold=f"below -{self.correlation:g} in two of three windows of {WINDOW} steps",
                fixes=(self._rate.advice(0.5, step=step), self.fixes[1]),
            )

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._loss.longest >= 3 * WINDOW else f"{self._loss.longest} of {3 * WINDOW} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows."""
        return {"loss": self._loss.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])

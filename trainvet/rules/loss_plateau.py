"""LO105: the loss has stopped falling, although the learning rate has not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

WINDOW = 20
LEARNT = 0.2


@dataclasses.dataclass
class LossPlateau(Rule):
    """
    ## What it checks
    Once the loss has fallen by a fifth: no median of 20 steps below the lowest one so far, by more than its noise, for ``steps`` steps and
    ``epochs`` epochs, at a learning rate of at least ``rate`` of its peak. Information, once per plateau.
    ## Why it matters
    Steps at a constant rate no longer pay: the rate is what keeps the loss from falling further, or there is nothing left to learn.
    ## What to do
    Lower the learning rate by 10 (or let a schedule do so), or stop.
    ## Known limits
    Never more than information: the end of a good run looks the same. A plateau ends with a new lowest median.
    """

    code = "LO105"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("a learning rate too high for what is left to learn", "everything that the data or the model allow has been learnt")
    fixes = ("lower the learning rate by 10, or use a schedule that decays", "stop the run")

    steps: int = 1000
    epochs: int = 2
    rate: float = 0.1

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._epoch = 0.0
        self._loss = Rollings(WINDOW * 5, start=0.0, best=0.0, since=0, begun=0, peak=0.0, told=False)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The length of an epoch in optimizer steps, where it is known."""
        self._rate.begin(facts)
        self._epoch = (facts.batches_per_epoch or 0) / max(1, facts.accumulation)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every window of 20 rows."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            for end in rows.windows(fresh, WINDOW):
                yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        kept, values, total, step = rows.kept, rows.values[max(0, end - 5 * WINDOW) : end], rows.total(end), int(rows.steps[end - 1])
        now, rate = median(values[-WINDOW:]), self._rate.at(step)
        kept["peak"] = max(kept["peak"], rate if math.isfinite(rate) else 0.0)
        change = np.diff(values)
        noise = 1.25 * 1.4826 * median(np.abs(change - median(change))) / math.sqrt(2 * WINDOW)
        if total == WINDOW:
            kept.update(start=median(values[:10]), best=now, since=total, begun=step)
        elif now < kept["best"] - noise:
            kept.update(best=now, since=total, begun=step, told=False)
        learnt = kept["start"] - kept["best"] >= LEARNT * abs(kept["start"]) > 0
        low = rate < self.rate * max(kept["peak"], self._rate.planned)
        if kept["told"] or low or not learnt or total - kept["since"] < max(self.steps, self.epochs * self._epoch) or not math.isfinite(now):
            return
        kept["told"] = True
        yield self.finding(
            step,
            f"no progress for {total - kept['since']} steps: the loss is {now:.4g}, its lowest was {kept['best']:.4g}",
            first_step=kept["begun"],
            where=name,
            evidence={"loss": now, "lowest": kept["best"], "noise": noise},
            threshold=f"{self.steps} steps and {self.epochs} epochs without a new lowest median of {WINDOW}",
            fixes=(self._rate.advice(0.1, step=step), self.fixes[1]),
        )

    def missing(self) -> str:
        """How many steps there were."""
        needed = WINDOW + int(max(self.steps, self.epochs * self._epoch))
        return "" if self._loss.longest >= needed else f"{self._loss.longest} of {needed} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows."""
        return {"loss": self._loss.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])

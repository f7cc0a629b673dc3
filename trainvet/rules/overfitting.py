"""FT101: the validation loss rises while the training loss still falls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.metrics import Course, Metrics, direction, held_out
from trainvet.rolling import Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

RECENT = 50
PART = 0.05


@dataclasses.dataclass
class Overfitting(Rule):
    """
    ## What it checks
    A validation loss was at its lowest ``patience`` evaluations, 50 steps and an epoch ago or more and is now above it by ``rise`` and by two
    standard errors, while the median of the last 50 training losses is below what it was at that evaluation. Information; a warning from ``much``
    on.
    ## Why it matters
    What the model learns now holds for the training data only: the weights of the lowest point are better than those at the end.
    ## What to do
    Stop at the evaluation named and keep its weights. More data, augmentation, dropout or weight decay move that point further out.
    ## Known limits
    Information only while a validation accuracy (or another metric for which higher is better) has its best value among the last two evaluations:
    the loss then rises because the model is too sure of its mistakes. Needs a metric with "val" and "loss" (or "error", "perplexity") in its
    name.
    """

    code = "FT101"
    reads: ClassVar[frozenset[str]] = frozenset({"metric.value", "loss.value"})
    causes = ("more training than the data allow for", "few training samples for so many parameters", "no augmentation, dropout or weight decay")
    fixes = ("stop at the evaluation named", "add dropout (0.1 to 0.5), weight decay or augmentation", "use a smaller model, or more data")

    rise: float = 0.05
    much: float = 0.2
    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._metrics = Metrics()
        self._loss = Rollings(RECENT)
        self._level: dict[str, float] = {}  # of the training loss when the metric was at its best
        self._told: dict[str, int] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The framework is named in the advice."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Take over the losses, then judge every validation loss that has a new value."""
        for _ in self._loss.add(snapshot, "loss.value"):
            pass
        for fresh in self._metrics.add(snapshot):
            for name in filter(lambda name: direction(name) < 0 and held_out(name), fresh):
                course = self._metrics.of[name]
                now = self._training(course.steps[-1])
                if course.age == 0 and course.best_count:
                    self._level[name] = now
                yield from self._judge(name, course, now)

    def _training(self, step: int) -> float:
        """The median of the last training losses up to ``step``, summed over all series; NaN where there is none."""
        last = [rows.values[rows.steps <= step][-RECENT:] for rows in self._loss.all()]
        levels = [median(values) for values in last if len(values)]
        return sum(levels) if levels else math.nan

    def _judge(self, name: str, course: Course, now: float) -> Iterator[Finding]:
        value, step = course.values[-1], course.steps[-1]
        scale = max(abs(course.best), PART * abs(course.first - course.best))
        falls = now < self._level.get(name, math.nan)
        apart = step - course.best_step >= max(RECENT, self._facts.batches_per_epoch or 0)  # else both medians are of the same losses
        if not (course.age >= self.patience and falls and apart):
            return
        error = 2 * course.noise * math.sqrt(2)
        if not value > course.best + max(self.rise * scale, error):
            return
        share = (value - course.best) / scale if scale > 0 else math.inf
        severity = Severity.WARNING if share >= self.much and not self._still_better() else Severity.INFO
        if self._told.get(name, 0) >= severity:
            return
        self._told[name] = int(severity)
        stop = (
            "EarlyStopping(monitor={!r}, patience=3, restore_best_weights=True)"
            if self._facts.framework == "keras"
            else "EarlyStopping({!r}, patience=3)"
        )
        yield self.finding(
            step,
            f"{name} was lowest at step {course.best_step} ({course.best:.3g}) and is {value:.3g} now, while the training loss has fallen"
            f" from {self._level[name]:.3g} to {now:.3g}",
            first_step=course.best_step,
            where=name,
            severity=severity,
            evidence={"now": value, "lowest": course.best, "evaluations since": course.age, "training loss": now},
            threshold=f"{self.rise:.0%} above the lowest and two standard errors, {self.patience} evaluations; a warning from {self.much:.0%}",
            fixes=(f"stop at step {course.best_step}: {stop.format(name)}", *self.fixes[1:]),
        )

    def _still_better(self) -> bool:
        """Is a validation metric for which higher is better still at its best?"""
        return any(direction(name) > 0 and held_out(name) and course.age < 2 for name, course in self._metrics.of.items())

    def missing(self) -> str:
        """How many evaluations there were."""
        counts = [course.count for name, course in self._metrics.of.items() if direction(name) < 0 and held_out(name)]
        if not counts:
            return "no validation loss was reported"
        return "" if max(counts) > self.patience else f"{max(counts)} of {self.patience + 1} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """The metrics' courses and the last training losses."""
        kept = {"level": dict(self._level), "told": dict(self._told)}
        return {"metrics": self._metrics.state_dict(), "loss": self._loss.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._metrics.load_state_dict(state["metrics"])
        self._loss.load_state_dict(state["loss"])
        self._level, self._told = dict(state["level"]), dict(state["told"])

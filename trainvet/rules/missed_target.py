"""FT105: a metric did not reach what the user expects of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.metrics import Course, Metrics, direction, words
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class MissedTarget(Rule):
    """
    ## What it checks
    At the end of the run, each metric of ``expect={"val_acc": 0.92}`` against the value given: a warning where it was never reached, information
    where it was reached and lost again, or where no such metric was reported.
    ## Why it matters
    A run that ends without an error and misses what it was meant to do has failed all the same.
    ## What to do
    The findings that came before this one are the likely reasons, the first of them above all.
    ## Known limits
    Which way is better is read from the name (loss, error, perplexity: lower; acc, auc, f1: higher). The target itself may be out of reach.
    """

    code = "FT105"
    reads: ClassVar[frozenset[str]] = frozenset({"metric.value"})
    causes = ("what the findings before this one say", "training too short", "a target that these data do not allow")
    fixes = ("follow the first finding of this report", "train longer, or lower the target")

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._metrics = Metrics()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What is expected."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Follow the metrics."""
        for _ in self._metrics.add(snapshot):
            pass
        return ()

    def end(self, step: int) -> Iterable[Finding]:
        """Compare each with what is expected of it."""
        for name, target in self._facts.expect.items():
            if direction(name):
                yield from self._judge(name, float(target), step)

    def _judge(self, name: str, target: float, step: int) -> Iterator[Finding]:
        course, sign = self._course(name), direction(name)
        if course is None:
            yield self._found(step, step, name, f"{name} was expected to reach {target:g} and was never reported", Severity.INFO, {"target": target})
            return
        last = course.values[-1]
        if sign * last >= sign * target:
            return
        reached = sign * course.best >= sign * target
        evidence = {"target": target, "last": last, "best": course.best}
        if reached:
            message = f"{name} reached {course.best:.4g} at step {course.best_step} and is {last:.4g} at the end; {target:g} was expected"
            yield self._found(step, course.best_step, name, message, Severity.INFO, evidence)
            return
        best = f", {course.best:.4g} at its best (step {course.best_step})" if math.isfinite(course.best) and course.best != last else ""
        yield self._found(step, course.steps[-1], name, f"{name} is {last:.4g} at the end{best}; {target:g} was expected", Severity.WARNING, evidence)

    def _found(self, step: int, first: int, name: str, message: str, severity: Severity, evidence: Mapping[str, float]) -> Finding:
        better = severity is Severity.INFO and "best" in evidence
        reported = ", ".join(sorted(self._metrics.of)) or "no metric at all"
        fixes = (f"keep the weights of step {first}: a checkpoint that follows {name}",) if better else self.fixes
        return self.finding(
            step,
            message,
            first_step=min(step, first),
            where=name,
            severity=severity,
            evidence=evidence,
            threshold=f"{name} of {evidence['target']:g}",
            causes=("the last steps made it worse",) if better else self.causes if "last" in evidence else ("another name: see what was reported",),
            fixes=fixes if "last" in evidence else (f"expect one of the metrics that were reported: {reported}",),
        )

    def _course(self, name: str) -> Course | None:
        """The metric of this name, or the only one whose name differs in spelling alone ("val/accuracy" for "val_acc")."""
        if name in self._metrics.of:
            return self._metrics.of[name]
        alike = [course for other, course in self._metrics.of.items() if _plain(other) == _plain(name)]
        return alike[0] if len(alike) == 1 else None

    def missing(self) -> str:
        """What is not expected, or not known."""
        if not self._facts.expect:
            return "nothing is expected: expect={'val_acc': 0.92}"
        unclear = [name for name in self._facts.expect if not direction(name)]
        return f"whether more or less is better is not known of {', '.join(unclear)}" if unclear else ""

    def state_dict(self) -> dict[str, Any]:
        """The metrics' courses."""
        return {"metrics": self._metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._metrics.load_state_dict(state["metrics"])


def _plain(name: str) -> list[str]:
    return [{"accuracy": "acc", "validation": "val", "valid": "val"}.get(word, word) for word in words(name)]

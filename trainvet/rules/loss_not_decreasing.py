"""LO104: after 200 steps and more the loss is no lower than at the start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.course import HALF, ROWS, Course
from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot

STEADY = 3.09  # one in a thousand


@dataclasses.dataclass
class LossNotDecreasing(Rule):
    """
    ## What it checks
    Means of 10 losses each, over more steps as the run goes on. Learning is proven when the last 10 of 20 means are lower than the first 10
    (one-sided Mann-Whitney test, ``z``) and their median has dropped by ``drop``, or by ``steady`` where z is above 3.09; or when the loss is
    ``fast`` below its very start and below
    what guessing would give; then the rule is off for good. Until then it looks after 200, 400, 800, … steps and speaks once the noise leaves no
    room for the drop a healthy course shows by then (0.75 of the steps looked at over those planned, at least ``drop``, at most ``healthy``).
    ## Why it matters
    Nothing is learnt, and no error says so.
    ## What to do
    See whether every part receives a gradient (GR104) and is held by the optimizer (WT102), then whether labels and inputs still belong together.
    Ten samples must be learnable by heart: if not, the fault is in the program and not in the data.
    ## Known limits
    Silent before 200 applied steps with at least half of the peak learning rate, and before 2,000 samples or one epoch. Resumed and pretrained
    runs are not judged. An error where the loss is still that of guessing among the classes. A run of unknown length counts as one of 1,000 steps.
    """

    code = "LO104"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate"})
    causes = (
        "learning rate too low or far too high",
        "labels that do not belong to the inputs",
        "a part without gradient or without optimizer",
        "dead units",
        "inputs that are not normalised",
    )
    fixes = (
        "look for GR104, WT102 and AC101 in this report",
        "train on ten samples until they are learnt by heart",
        "check that labels follow their inputs",
    )

    z: float = 2.33
    drop: float = 0.02
    steady: float = 0.005
    fast: float = 0.2
    healthy: float = 0.2
    samples: int = 2000

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._facts = Facts()
        self._epoch = -1
        self._loss = Rollings(ROWS, start=0.0, begun=0, proven=False, told=False, judged=0)
        self._course: dict[str, Course] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The run's length, its schedule and its losses."""
        self._facts = facts
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Take over ten rows after ten, and judge when it is time."""
        self._rate.follow(snapshot)
        if self._facts.resumed or self._facts.pretrained:
            return
        if snapshot.epoch and self._epoch < 0:
            self._epoch = snapshot.step - snapshot.batch // max(1, self._facts.accumulation)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            course = self._course.setdefault(name, Course())
            for end in rows.windows(fresh, ROWS):
                if rows.kept["proven"]:
                    break
                values, step = rows.values[end - ROWS : end], int(rows.steps[end - 1])
                if rows.total(end) == ROWS:
                    rows.kept.update(start=median(values), begun=int(rows.steps[end - ROWS]))
                course.add(float(values.mean()), self._rate.at(step), self._rate.planned)
                if course.due and self._enough(name, rows.total(end), step):
                    yield from self._judge(name, rows, course, rows.total(end), step)

    def _enough(self, name: str, seen: int, step: int) -> bool:
        samples = self._facts.loss(name).samples * max(1, self._facts.accumulation)
        return not samples or seen * samples >= self.samples or 0 <= self._epoch <= step

    def _judge(self, name: str, rows: Rolling, course: Course, seen: int, step: int) -> Iterable[Finding]:
        kept, halves, guess = rows.kept, course.halves(), _guess(self._facts.loss(name))
        course.due, kept["judged"] = False, kept["judged"] + 1
        reference = min(kept["start"], guess)
        needed = self.steady if halves.z >= STEADY else self.drop  # a loss with a floor of its own (soft targets) falls little, but steadily
        fallen = halves.z >= self.z and halves.begin - halves.level >= needed * abs(halves.begin)
        kept["proven"] = fallen or reference - halves.now >= self.fast * abs(reference)
        expected = min(self.healthy, 0.75 * course.rows / (self._facts.planned_steps or max(1000, 2 * seen)))
        still_possible = halves.drop + 2 * halves.error >= expected * halves.scale
        if kept["proven"] or kept["told"] or expected < self.drop or still_possible:
            return
        kept["told"] = True
        rate, known = self._rate.at(step), math.isfinite(guess)
        yield self.finding(
            step,
            f"in {seen} steps the loss has gone from {halves.begin:.4g} to {halves.level:.4g}" + (f"; guessing gives {guess:.4g}" if known else ""),
            first_step=kept["begun"],
            where=name,
            severity=Severity.ERROR if halves.now >= (1 - self.drop) * guess else Severity.WARNING,
            evidence={"at first": halves.begin, "now": halves.level, "z": halves.z} | ({"guessing": guess} if known else {}),
            threshold=f"z of {self.z:g} and a drop of {self.drop:.0%}, or {self.fast:.0%} below the start",
            fixes=(
                *self.fixes,
                f"try learning rates between {rate / 10:.1g} and {rate * 10:.1g} (now {rate:.3g})" if rate > 0 else "try other learning rates",
            ),
        )

    def missing(self) -> str:
        """How many steps there were, or that the noise is too large."""
        if self._facts.resumed or self._facts.pretrained:
            return "not judged: resumed or pretrained"
        if any(rows.kept["proven"] or rows.kept["told"] for rows in self._loss.all()):
            return ""
        seen = max((course.rows for course in self._course.values()), default=0)
        if any(rows.kept["judged"] for rows in self._loss.all()):
            return f"undecided after {seen} steps: the loss is too noisy"
        return f"{seen} of {2 * HALF * ROWS} applied steps with at least half of the peak learning rate"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's blocks."""
        courses = {name: dataclasses.asdict(course) for name, course in self._course.items()}
        return {"loss": self._loss.state_dict(), "course": courses, "rate": self._rate.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._epoch = int(state["epoch"])
        self._course = {name: Course(**course) for name, course in state["course"].items()}
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])


def _guess(loss: Loss) -> float:
    """The loss of guessing among the classes; infinity where it is not known."""
    if loss.reduction != "mean" or loss.weighted:
        return math.inf
    classes = {"cross_entropy": loss.classes, "binary_cross_entropy": 2}.get(loss.kind, 0)
    return math.log(classes) if classes > 1 else math.inf

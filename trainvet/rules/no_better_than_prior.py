"""LO107: a classifier does no better than one that knows how frequent each class is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding
from trainvet.learning_rate import LearningRate
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot

WINDOW, FIRST, LATE = 100, 200, 500
PLANNED = 0.1
PER_CLASS = 20
CLEAR = 2.33


@dataclasses.dataclass
class NoBetterThanPrior(Rule):
    """
    ## What it checks
    After 200 steps and one epoch, 500 steps or a tenth of the run, and ``labels`` labels (20 per class): the mean cross-entropy of 100 steps,
    twice in a row, is at least ``share`` of the entropy of the labels counted so far and no lower than in the 100 steps before.
    ## Why it matters
    The model has found out how frequent each class is and nothing else: its outputs do not depend on what it is shown.
    ## What to do
    See whether labels still belong to their inputs and whether gradients reach the first layers; then try a higher learning rate.
    ## Known limits
    Not judged: smoothed losses, summed or composed ones, soft labels, losses whose start shows other weights than those of the classes, and
    stretches in which the learning rate is below half of its peak. Where inputs say nothing about labels this is the best one can do.
    """

    code = "LO107"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate", "label.entropy", "label.seen"})
    causes = (
        "labels that do not belong to the inputs",
        "inputs that do not reach the output: dead units, a missing gradient, a constant output",
        "learning rate too low or far too high",
    )
    fixes = ("check that labels follow their inputs: shuffle both together", "train on ten samples until they are learnt by heart")

    share: float = 0.98
    labels: int = 1000
    patience: int = 2

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rate = LearningRate()
        self._loss = Rollings(2 * WINDOW, start=0.0, peak=0.0, bad=0, first=0, told=False, judged=False)
        self._labels: dict[str, list[float]] = {}  # entropy, labels counted

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The kind of loss becomes known during the first steps."""
        self._facts = facts
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every window of 100 rows; the labels of this snapshot's last step count from the next one on."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            for end in rows.windows(fresh, WINDOW):
                rate = self._rate.at(int(rows.steps[end - 1]))
                rows.kept["peak"] = max(rows.kept["peak"], rate) if rate > 0 else rows.kept["peak"]
                if rows.total(end) == WINDOW:
                    rows.kept["start"] = float(rows.values[end - WINDOW : end - WINDOW + 10].mean())
                elif rows.total(end) >= FIRST:
                    yield from self._judge(name, rows, end)
        entropy = snapshot.column("label.entropy")
        if entropy is not None:
            for name, value, seen in zip(*entropy, snapshot.values("label.seen", entropy[0]), strict=True):
                self._labels[name] = [float(value), float(seen)]

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        kept, loss, step = rows.kept, self._facts.loss(name), int(rows.steps[end - 1])
        entropy, seen = self._labels.get(loss.label, [math.nan, 0.0])
        if kept["told"] or self._why_not(loss, kept["start"]) or not (entropy > 0 and seen >= max(self.labels, PER_CLASS * loss.classes)):
            return
        if rows.total(end) < self._from() or self._rate.at(step) < max(self._rate.planned, kept["peak"]) / 2:
            return
        now, before = rows.values[end - WINDOW : end], rows.values[max(0, end - 2 * WINDOW) : end - WINDOW]
        kept["judged"] = True
        error = math.sqrt(float(now.var()) / len(now) + float(before.var()) / len(before))
        mean = float(now.mean())
        falls = float(before.mean()) - mean > CLEAR * error
        if mean < self.share * entropy or falls or not math.isfinite(mean):
            kept["bad"] = 0
            return
        kept.update(bad=kept["bad"] + 1, first=kept["first"] if kept["bad"] else int(rows.steps[end - WINDOW]))
        if kept["bad"] < self.patience:
            return
        kept["told"] = True
        rate = self._rate.at(step)
        advice = f"try learning rates between {rate / 10:.1g} and {rate * 10:.1g} (now {rate:.3g})" if rate > 0 else "try other learning rates"
        yield self.finding(
            step,
            f"after {rows.total(end)} steps the loss is {mean:.4g}; knowing only how frequent each class is gives {entropy:.4g}",
            first_step=kept["first"],
            where=name,
            evidence={"loss": mean, "entropy": entropy, "labels": seen},
            threshold=f"{self.share:g} times the entropy of the labels, {self.patience} times {WINDOW} steps",
            fixes=(*self.fixes, advice),
        )

    def _from(self) -> float:
        planned = self._facts.planned_steps
        epoch = math.ceil((self._facts.batches_per_epoch or LATE) / max(1, self._facts.accumulation))
        return max(FIRST, PLANNED * planned, min(epoch, LATE)) if planned else max(FIRST, LATE)

    def _why_not(self, loss: Loss, start: float) -> str:
        if loss.kind not in ("cross_entropy", "binary_cross_entropy") or loss.classes < 2 or loss.reduction != "mean":
            return "no plain cross-entropy over classes is known"
        if loss.smoothed:
            return "not judged: smoothed labels"
        if loss.weighted and not 0.9 * math.log(loss.classes) <= start <= 1.3 * math.log(loss.classes):
            return "not judged: weights of unknown scale"
        return ""

    def missing(self) -> str:
        """What is not known, or how much there was."""
        if any(rows.kept["judged"] or rows.kept["told"] for rows in self._loss.all()):
            return ""
        reasons = [self._why_not(self._facts.loss(name), rows.kept["start"]) for name, rows in self._loss.items()]
        if reasons and all(reasons):
            return reasons[0]
        if self._loss.longest and not self._labels:
            return "no class labels were seen"
        seen = max((int(seen) for _, seen in self._labels.values()), default=0)
        return f"{self._loss.longest} of {self._from():.0f} applied steps, {seen} of {self.labels} labels (20 per class)"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows and the labels' entropy."""
        labels = {name: list(item) for name, item in self._labels.items()}
        return {"loss": self._loss.state_dict(), "rate": self._rate.state_dict(), "labels": labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])
        self._labels = {name: list(item) for name, item in state["labels"].items()}

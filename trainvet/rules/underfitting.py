"""FT102: at the end of the run the model does hardly better than one that ignores its inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot

LAST, FIRST, LABELS, PER_CLASS = 200, 200, 1000, 20


@dataclasses.dataclass
class Underfitting(Rule):
    """
    ## What it checks
    At the end of the run, the mean of the last 200 losses over what the best constant prediction gives: the entropy of the labels for
    cross-entropy, the variance of the targets for squared errors. Information above ``little``; a warning above ``nothing`` where the run had
    ``steps`` steps.
    ## Why it matters
    The inputs hardly matter to what the model says. More of the same training seldom changes that.
    ## What to do
    Ten samples must be learnable by heart: if they are not, look for a fault in the program; if they are, the model is too small, the penalty too
    strong, the rate too low, or the inputs say little about the targets.
    ## Known limits
    Some problems allow no more (click rates, returns), hence information first. Not judged: smoothed, weighted, summed and composed losses, soft
    labels, fewer than 1,000 labels (20 per class), and targets whose scale differs from batch to batch.
    """

    code = "FT102"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "label.entropy", "label.seen", "label.mean", "label.mean_square", "label.count"})
    causes = (
        "labels that do not belong to the inputs, or inputs that do not reach the output",
        "model too small, or weight decay and dropout too strong",
        "learning rate too low, or training too short",
    )
    fixes = ("train on ten samples until they are learnt by heart", "use a larger model, or less weight decay and dropout", "raise the learning rate")

    little: float = 0.9
    nothing: float = 0.98
    steps: int = 500

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._loss = Rollings(LAST)
        self._labels: dict[str, list[float]] = {}  # entropy, labels; count, sum, sum of squares

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The kind of loss becomes known during the first steps."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Keep the last losses, and what is known of the labels."""
        for _ in self._loss.add(snapshot, "loss.value"):
            pass
        table = snapshot.tables.get("label")
        for name in table.names if table is not None else ():
            entropy, seen, count, mean, square = (
                float(snapshot.values(f"label.{key}", (name,))[0]) for key in ("entropy", "seen", "count", "mean", "mean_square")
            )
            kept = self._labels.setdefault(name, [math.nan, 0.0, 0.0, 0.0, 0.0])
            if math.isfinite(entropy):
                kept[:2] = [entropy, seen]
            with_numbers = math.isfinite(count) and math.isfinite(mean) and math.isfinite(square)
            if with_numbers and math.isfinite(count * square):
                kept[2:] = [kept[2] + count, kept[3] + count * mean, kept[4] + count * square]
        return ()

    def end(self, step: int) -> Iterable[Finding]:
        """Compare the last losses with those of a constant prediction."""
        for name, rows in self._loss.items():
            yield from self._judge(name, rows, step)

    def _judge(self, name: str, rows: Rolling, step: int) -> Iterator[Finding]:
        trivial, what = self._trivial(self._facts.loss(name))
        if rows.count < FIRST or not trivial > 0:
            return
        loss = float(rows.values[-LAST:].mean())
        share = loss / trivial
        if not share > self.little or not math.isfinite(share):
            return
        yield self.finding(
            step,
            f"the run ends with a loss of {loss:.4g}; {what} gives {trivial:.4g}",
            first_step=min(step, int(rows.steps[-LAST:][0])),
            where=name,
            severity=Severity.WARNING if share > self.nothing and rows.count >= self.steps else Severity.INFO,
            evidence={"loss": loss, "constant prediction": trivial, "share": share},
            threshold=f"{self.little:g} of it, a warning above {self.nothing:g}",
        )

    def _trivial(self, loss: Loss) -> tuple[float, str]:
        """The loss of the best constant prediction, and what that is; NaN and the reason where it is not known."""
        entropy, seen, count, total, squares = self._labels.get(loss.label, [math.nan, 0.0, 0.0, 0.0, 0.0])
        if loss.reduction != "mean" or loss.weighted or loss.smoothed:
            return math.nan, "not judged: a smoothed, weighted or summed loss"
        if loss.kind in ("cross_entropy", "binary_cross_entropy"):
            enough = seen >= max(LABELS, PER_CLASS * loss.classes)
            return (entropy, "guessing by how frequent each class is") if enough else (math.nan, f"{seen:.0f} labels of 1000 (20 per class)")
        if loss.kind == "regression":
            enough = count >= LABELS
            variance = squares / count - (total / count) ** 2 if enough else math.nan
            return (variance, "always saying the targets' mean") if enough else (math.nan, f"{count:.0f} of 1000 labels")
        return math.nan, "the loss is of unknown composition"

    def missing(self) -> str:
        """What is not known, or how many steps there were."""
        if self._loss.longest < FIRST:
            return f"{self._loss.longest} of {FIRST} applied steps"
        known = [self._trivial(self._facts.loss(name)) for name, _ in self._loss.items()]
        return "" if any(math.isfinite(value) for value, _ in known) else known[0][1]

    def state_dict(self) -> dict[str, Any]:
        """The last losses and the sums over labels."""
        return {"loss": self._loss.state_dict(), "labels": {name: list(kept) for name, kept in self._labels.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._labels = {name: list(kept) for name, kept in state["labels"].items()}

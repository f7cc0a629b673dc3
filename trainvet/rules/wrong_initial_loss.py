"""LO108: the very first losses are not those of a model that knows nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot

FIRST = 10
NORMAL = (0.05, 5.0)  # standard deviation of inputs that cannot be what makes the first loss large


@dataclasses.dataclass
class WrongInitialLoss(Rule):
    """
    ## What it checks
    The mean of the first losses over at least ``samples`` samples and the first loss alone. Cross-entropy: more than ``excess`` above ln(classes)
    is a warning, less than half of it (and 4 standard errors below) information. Squared error over the targets' mean square: above ``ratio`` is a
    warning, outside [0.3, 3] information. About ln(classes) times the number of samples: the loss is summed (information).
    ## Why it matters
    E[cross-entropy] is about ln(classes) + s²/2 for logits of standard deviation s: 2 above means that the untrained model is very sure of
    nonsense. The first steps are spent on unlearning that, often with gradients that damage the rest.
    ## What to do
    Normalise the inputs; where they are (standard deviation 0.05 to 5, mean no further from 0 than 5), it is the weights: start the last layer with
    small ones (a default Linear layer stays within 0.03 of ln(classes)), the others with He or Glorot.
    ## Known limits
    Not judged: resumed and pretrained runs, weighted and composed losses, batches so small that 10 steps hold fewer than ``samples`` samples.
    A loss that starts too low mostly is a scaled one or one with loaded weights, hence information.
    """

    code = "LO108"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "label.mean_square", "input.mean", "input.std"})
    causes = ("inputs that are not normalised", "weights of the last layer too large at the start", "a loss that is summed instead of averaged")
    fixes = ("normalise the inputs", "use a small initialisation for the last layer", "average the loss over the samples")

    excess: float = 2.0
    ratio: float = 100.0
    samples: int = 128

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._loss = Rollings(FIRST, steps=[], values=[], judged=False)
        self._squares: dict[int, float] = {}
        self._normal: bool | None = None

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The kind of loss becomes known during the first steps."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Collect the first losses; judge each series once."""
        labels = snapshot.column("label.mean_square")
        if labels is not None and len(labels[0]) == 1 and len(self._squares) < FIRST:
            self._squares[snapshot.step] = float(labels[1][0])
        self._look(snapshot)
        for _, rows, fresh in self._loss.add(snapshot, "loss.value"):
            wanted = max(0, FIRST - len(rows.kept["steps"]))
            if wanted:
                rows.kept["steps"] += rows.steps[-fresh:][:wanted].tolist()
                rows.kept["values"] += rows.values[-fresh:][:wanted].tolist()
        for name, rows in self._loss.items():
            if not rows.kept["judged"]:
                yield from self._judge(name, rows)

    def _look(self, snapshot: Snapshot) -> None:
        """Are the inputs of the first sample on a normal scale? Unknown where some of them is not measured."""
        spread = snapshot.column("input.std")
        if self._normal is not None or spread is None or not len(spread[0]):
            return
        mean = snapshot.values("input.mean", spread[0])
        self._normal = bool(np.all((spread[1] >= NORMAL[0]) & (spread[1] <= NORMAL[1]) & (np.abs(mean) <= NORMAL[1])))

    def _judge(self, name: str, rows: Rolling) -> Iterable[Finding]:
        loss, kept = self._facts.loss(name), rows.kept
        count = math.ceil(self.samples / loss.samples) if loss.samples else FIRST + 1
        values, steps = kept["values"][:count], kept["steps"][:count]
        squares = [self._squares[step] for step in steps if step in self._squares]
        if self._why_not(loss) or len(values) < count or (loss.kind == "regression" and not squares):
            return
        kept["judged"] = True
        squared = loss.kind == "regression"
        expected = sum(squares) / len(squares) if squared else math.log(loss.classes)
        if not expected > 0:
            return
        share = loss.samples if loss.reduction == "sum" else 1
        mean, first = sum(values) / count / share, values[0] / share
        error = max(math.sqrt(sum((value / share - mean) ** 2 for value in values)) / count, 1 / math.sqrt(loss.samples * count))
        low, top = (0.3 * expected, 3 * expected) if squared else (min(0.5 * expected, expected - 4 * error), math.inf)
        high = self.ratio * expected if squared else expected + self.excess
        outcome = "summed" if share > 1 else ""
        if loss.samples > 1 and share == 1 and abs(mean / (loss.samples * expected) - 1) <= 0.2:
            outcome = "summed"
        elif not (mean <= high or first <= high):
            outcome = "high"
        elif not low <= mean <= top and not low <= first <= top:
            outcome = "odd"
        if not outcome:
            return
        factor = math.sqrt(expected / mean) if squared else 1 / math.sqrt(2 * (mean - expected)) if outcome == "high" else 1.0
        layer = loss.output_layer or "the last layer"
        scale = f"scale the initial weights of {layer} by about {factor:.1g}"
        weights = (self.causes[1], "weights of other layers too large at the start"), (scale, "initialise the other layers with He or Glorot")
        causes, fixes = {
            "high": weights if self._normal else (self.causes[:2], (self.fixes[0], scale)),
            "summed": (self.causes[2:], self.fixes[2:]),
            "odd": (("a loss that is scaled, or averaged over padding", "weights that were loaded"), ("check what the loss is averaged over",)),
        }[outcome]
        normal = "the targets' mean square" if squared else f"guessing among {loss.classes} classes"
        told = f"the first losses are {mean:.3g} where {normal} gives {expected:.3g}"
        yield self.finding(
            steps[-1],
            told + (f", summed over {loss.samples} samples" if outcome == "summed" else ""),
            first_step=steps[0],
            where=name,
            severity=Severity.WARNING if outcome == "high" else Severity.INFO,
            evidence={"loss": mean, "expected": expected, "samples": loss.samples * count},
            threshold=f"a warning above {high:.3g}",
            causes=causes,
            fixes=fixes,
        )

    def _why_not(self, loss: Loss) -> str:
        if self._facts.resumed or self._facts.pretrained:
            return "not judged: resumed or pretrained"
        known = loss.kind == "regression" or (loss.kind in ("cross_entropy", "binary_cross_entropy") and loss.classes > 1)
        if not known or loss.weighted or loss.reduction not in ("mean", "sum"):
            return "not judged: a loss of unknown composition"
        return ""

    def missing(self) -> str:
        """Why the first losses were not judged."""
        if any(rows.kept["judged"] for rows in self._loss.all()) or not self._loss.longest:
            return "" if self._loss.longest else "the first losses"
        reasons = [self._why_not(self._facts.loss(name)) for name, _ in self._loss.items()]
        return next(filter(None, reasons), f"{self.samples} samples within {FIRST} steps")

    def state_dict(self) -> dict[str, Any]:
        """The first losses."""
        squares = [[step, value] for step, value in self._squares.items()]
        return {"loss": self._loss.state_dict(), "squares": squares, "normal": self._normal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._squares = {int(step): float(value) for step, value in state["squares"]}
        self._normal = state["normal"]

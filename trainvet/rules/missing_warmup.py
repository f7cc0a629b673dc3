"""LR103: a transformer under Adam starts at its full learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import READS, Matrices, median
from trainvet.rolling import Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

FIRST = 10
WINDOW = 20
RAMP = 0.5  # a start below this share of the peak is a warm-up
FALL = 0.02  # of the first losses: less is no progress


@dataclasses.dataclass
class MissingWarmup(Rule):
    """
    ## What it checks
    A model with attention or layer normalisation, an optimizer of the Adam family, and a learning rate above ``gentle`` that starts at half of its
    peak or more. A warning where, in addition, the first 10 steps moved the weights by more than ``ratio`` (median over matrices) and the loss is
    not below its start after ``steps`` steps; else information.
    ## Why it matters
    Adam's first steps have full length whatever the gradient, and its averages take 2/(1-beta2) steps to settle. Attention saturates early.
    ## What to do
    Raise the rate from 0 over the first 2/(1-beta2) steps, 2,000 for the default betas, or a few per cent of a short run.
    ## Known limits
    Pre-norm models often do without. Not judged: resumed and pretrained runs, and runs of fewer than ``steps`` applied steps. Source: Ma and Yarats,
    On the adequacy of untuned warmup for adaptive optimization, 2021.
    """

    code = "LR103"
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate", "loss.value"}
    causes = ("no warm-up of the learning rate",)
    fixes = ("raise the learning rate linearly over the first steps", "lower the learning rate")

    ratio: float = 0.05
    gentle: float = 1e-5
    steps: int = 200

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices = Matrices()
        self._rate = LearningRate()
        self._concerned: str | None = None
        self._moved = 0.0
        self._started = -1.0  # the highest rate of the first step
        self._top = 0.0
        self._loss = Rollings(WINDOW, start=[])
        self._judged = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Is it a transformer under Adam?"""
        self._facts = facts
        self._matrices.begin(facts)
        self._rate.begin(facts)
        words = [(item.kind, item.type.lower()) for item in facts.layers]
        words += [("", item.module_type.lower()) for item in facts.parameters.values() if item.module_type]
        attention = any(kind == "attention" or "attention" in type_ for kind, type_ in words)
        normal = any("layernorm" in type_ or "layernormalization" in type_ or "rmsnorm" in type_ for _, type_ in words)
        adam = any(item.family == "adam" for item in facts.optimizers)
        known = bool(words) and bool(facts.optimizers)
        self._concerned = None if not known else "attention" if adam and attention else "layer normalisation" if adam and normal else ""
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Collect rates, first updates and losses; judge once, at the loss of step ``steps``."""
        self._rate.follow(snapshot)
        if self._judged:
            return
        tracks = list(snapshot.tracks("optimizer.learning_rate").values())
        if tracks and self._started < 0:
            self._started = max(float(track.values[0]) for track in tracks)
        for track in tracks:
            rates = track.values[np.isfinite(track.values) & (track.applied <= self.steps)]
            self._top = max(self._top, float(rates.max(initial=0.0)))
        if snapshot.applied <= FIRST:
            names, ratios, before = self._matrices.ratios(snapshot)
            big = ratios[before >= 1e-3] if names else ratios
            self._moved = max(self._moved, median(big)) if len(big) else self._moved
        for _, loss, fresh in self._loss.add(snapshot, "loss.value"):
            if len(loss.kept["start"]) < FIRST:
                loss.kept["start"] += loss.values[-fresh:][: FIRST - len(loss.kept["start"])].tolist()
            last = loss.applied - self.steps  # rows past the step that is judged
            if last >= 0 and len(loss.kept["start"]) == FIRST and not self._judged:
                self._judged = True
                end = len(loss.values) - min(last, fresh - 1)
                yield from self._judge(
                    int(loss.steps[end - 1]), median(np.array(loss.kept["start"])), median(loss.values[max(0, end - WINDOW) : end])
                )

    def _judge(self, step: int, start: float, now: float) -> Iterable[Finding]:
        peak = max(self._top, self._rate.planned)
        facts = self._facts
        if not self._concerned or facts.resumed or facts.pretrained or not peak > self.gentle or not self._started >= RAMP * peak:
            return
        stuck = self._moved > self.ratio and not start - now > FALL * abs(start)
        told = f"; the first updates moved the weights by {self._moved:.2g}, and the loss went from {start:.3g} to {now:.3g}" if stuck else ""
        planned = facts.planned_steps
        fix = self._rate.warm_up()
        if planned and planned < 10_000:
            fix = f"warm the learning rate up over the first {max(1, planned // 20)} steps (a twentieth of the run)"
        yield self.finding(
            step,
            f"a model with {self._concerned} starts at its full learning rate of {self._started:.3g} under Adam{told}",
            first_step=0 if stuck else step,
            where="learning rate",
            severity=Severity.WARNING if stuck else Severity.INFO,
            evidence={"first rate": self._started, "peak rate": peak, "update ratio": self._moved, "loss at first": start, "loss": now},
            threshold=f"a start below {RAMP:.0%} of the peak; a warning above a ratio of {self.ratio:g} without progress",
            fixes=(fix, self._rate.advice(0.1, step=step)),
        )

    def missing(self) -> str:
        """Why it was not judged."""
        if self._concerned is None:
            return "the layers or the optimizer are not known"
        if not self._concerned:
            return "no attention or layer normalisation under Adam was seen"
        return "" if self._judged else f"the loss of {self.steps} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """What was collected."""
        kept = {"moved": self._moved, "started": self._started, "top": self._top, "judged": self._judged}
        return {**kept, "loss": self._loss.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._moved, self._started, self._top = float(state["moved"]), float(state["started"]), float(state["top"])
        self._judged = bool(state["judged"])
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])

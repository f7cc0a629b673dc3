"""GR101: the gradient norm has grown far beyond what it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

SPAN, LEAST, FIRST, REFERENCE, HISTORY, RISE = 20, 5, 10, 100, 1000, 1e-6

BESIDE = 5.0  # how much larger than later, beside the loss, the first gradients must be: 33 in an explosion, 0.1 in a net that fits at once


@dataclasses.dataclass
class ExplodingGradient(Rule):
    """
    ## What it checks
    The gradient norm's median over 20 steps (at least 5 measured ones), in ``patience`` windows in a row above ``rise`` times the median of up to
    1,000 steps before them (at least 100, from step 20 on) and above the first of these. And once, at step 120: the largest norm of the
    first 10 steps above ``start`` times the median of steps 20 to 120, an explosion that is over when one looks; information where the norm is
    clipped at that median or below, since no step was longer for it.
    ## Why it matters
    Each step moves the weights far and in a direction that means little; the next stations are a runaway loss and NaN.
    ## What to do
    Clip the gradient norm at the healthy median named; lower or warm up the learning rate. Recurrent nets: orthogonal recurrent weights, clipping.
    ## Known limits
    Silent before step 160, while the learning rate rises and while the loss is at its lowest. Slow growth over thousands of steps, and a norm that
    was too large from the first to the last step, are not seen. Largest healthy values measured: 1.94 times the median before, 14.9 at the start.
    """

    code = "GR101"
    reads: ClassVar[frozenset[str]] = frozenset({"run.gradient_norm", "gradient.norm", "loss.value", "optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = (
        "learning rate too high, or no warm-up",
        "recurrent or very deep layers with a gain above 1",
        "targets or inputs on a large scale",
        "no clipping",
    )
    fixes = ("clip the gradient norm", "lower the learning rate", "start recurrent weights orthogonal, with gain 1")

    rise: float = 5.0
    start: float = 100.0
    patience: int = 2

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._clipping = 0.0
        self._largest: dict[str, Any] = {"first": "", "norm": 0.0, "now": ""}
        self._loss = Rollings(SPAN, lowest=None, records=[], top=None)
        self._norm = Rollings(SPAN, origin=-1, open=0, first=[], early=-1.0, windows=[], bad=0, good=0, told=False)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The clipping threshold and the groups' schedules."""
        self._clipping = facts.clipping or 0.0
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Close the windows that are complete: 20 steps, and more where fewer than 5 of them were measured."""
        self._rate.follow(snapshot)
        for _, rows, fresh in self._loss.add(snapshot, "loss.value"):
            early = rows.values[-fresh:][: max(0, FIRST - (rows.count - fresh))]
            if len(early):
                rows.kept["top"] = max(float(early.max()), rows.kept["top"] or float(early[0]))
            for end in rows.windows(fresh, SPAN):
                now, lowest = median(rows.values[end - SPAN : end]), rows.kept["lowest"]
                record = lowest is None or now < lowest
                rows.kept.update(lowest=now if record else lowest, records=[*rows.kept["records"][-99:], [int(rows.steps[end - 1]), record]])
        for name, rows, fresh in self._norm.add(snapshot, "run.gradient_norm"):
            kept, steps, length = rows.kept, rows.steps, len(rows.steps)
            if kept["origin"] < 0:
                kept["origin"] = int(steps[0])
            begin = max(length - fresh - kept["open"], int(np.searchsorted(steps, kept["origin"] + SPAN)))
            start = slice(length - fresh, int(np.searchsorted(steps, kept["origin"] + FIRST)))
            kept["first"] += [list(pair) for pair in zip(rows.values[start].tolist(), steps[start].tolist(), strict=True)]
            while begin < length:
                end = max(begin + LEAST, int(np.searchsorted(steps, steps[begin] + SPAN - 1)) + 1)
                if end > length:
                    break
                yield from self._judge(name, rows, begin, end)
                begin = end
            kept["open"] = max(0, length - begin)
        self._look(snapshot)

    def _look(self, snapshot: Snapshot) -> None:
        """Where the largest gradient is: on the latest sample, and at the highest point of the first 10 steps."""
        column = snapshot.column("gradient.norm")
        if column is None or not len(column[0]):
            return
        row = int(np.argmax(column[1]))
        self._largest["now"] = column[0][row]
        if snapshot.applied <= FIRST and not column[1][row] <= self._largest["norm"]:
            self._largest.update(first=column[0][row], norm=float(column[1][row]))

    def _judge(self, name: str, rows: Rolling, begin: int, end: int) -> Iterable[Finding]:
        kept, first, step = rows.kept, int(rows.steps[begin]), int(rows.steps[end - 1])
        now, rate = median(rows.values[begin:end]), self._rate.at(step)
        windows = [item for item in kept["windows"] if item[2] >= first - HISTORY]
        rising = bool(windows) and rate > windows[-1][3] * (1 + RISE)
        usual = _usual([item for item in windows[: len(windows) - kept["bad"]] if not item[3] < rate / 2])
        kept["windows"] = [*windows, [now, first, step, rate]]
        if kept["early"] < 0 and step >= kept["origin"] + SPAN + REFERENCE - 1:
            kept["early"] = median(np.array([item[0] for item in kept["windows"]]))
            over = [pair for pair in kept["first"] if pair[0] > self.start * kept["early"] > 0]
            if over and not self._fitted(max(over)[0], kept["early"]):
                highest = max(over)[0]
                message = f"the gradient norm was {highest:.3g} within the first {FIRST} steps and is {kept['early']:.3g} since step {SPAN}"
                yield self._found(name, step, over[0][1], message, highest, kept["early"], f"{self.start:g} times the median after it", "first")
        calm = rising or self._improves(step)
        if calm or not usual > 0 or now <= max(self.rise * usual, kept["early"]):
            kept.update(bad=0, good=kept["good"] + (not calm))
            kept["told"] = kept["told"] and kept["good"] < self.patience
            return
        kept.update(bad=kept["bad"] + 1, good=0)
        if kept["bad"] >= self.patience and not kept["told"]:
            kept["told"] = True
            since = int(kept["windows"][-kept["bad"]][1])
            message = f"the gradient norm has risen to {now:.3g}, {now / usual:.2g} times what it was"
            yield self._found(name, step, since, message, now, usual, f"{self.rise:g} times the median before, in {self.patience} windows", "now")

    def _fitted(self, highest: float, early: float) -> bool:
        """Did the gradient only fall with the loss, as in a net that learns its data quickly? An explosion is large beside its loss, too."""
        losses = [(rows.kept["top"], rows.kept["lowest"]) for rows in self._loss.all() if rows.kept["top"] and rows.kept["lowest"]]
        return any(top > 0 and lowest > 0 and highest / top <= BESIDE * early / lowest for top, lowest in losses)

    def _improves(self, step: int) -> bool:
        """Is every loss, in its last 20 rows up to ``step``, at its lowest? Then a large gradient does no harm."""
        latest = [[record for end, record in rows.kept["records"] if end <= step][-1:] for rows in self._loss.all()]
        return bool(latest) and all(records == [True] for records in latest)

    def _found(self, name: str, step: int, since: int, message: str, now: float, usual: float, threshold: str, when: str) -> Finding:
        clip = f"lower the clipping threshold to {usual:.2g} (now {self._clipping:g})" if self._clipping > usual else ""
        clip = clip or f"clip the gradient norm at {usual:.2g} (the median of the healthy steps)"
        contained = when == "first" and 0 < self._clipping <= usual  # it is over, and no step was longer for it
        largest = str(self._largest[when]) if len(self._norm.all()) == 1 else ""
        return self.finding(
            step,
            message,
            first_step=since,
            subjects=[largest] if largest else (),
            where=f"gradient norm, largest in {largest}" if largest else name,
            severity=Severity.INFO if contained else Severity.WARNING if self._clipping > 0 else Severity.ERROR,
            evidence={"gradient norm": now, "healthy": usual},
            threshold=threshold,
            fixes=(*([] if 0 < self._clipping <= usual else [clip]), self._rate.advice(0.1, step=step), self._rate.warm_up(), self.fixes[2]),
        )

    def missing(self) -> str:
        """How many norms there were."""
        if any(rows.kept["early"] >= 0 for rows in self._norm.all()):
            return ""
        seen = max((int(rows.steps[-1]) - rows.kept["origin"] + 1 for rows in self._norm.all() if len(rows.steps)), default=0)
        return f"norms of {seen} of {SPAN + REFERENCE} steps"

    def state_dict(self) -> dict[str, Any]:
        """Each norm's windows."""
        return {"norm": self._norm.state_dict(), "loss": self._loss.state_dict(), "rate": self._rate.state_dict(), "largest": dict(self._largest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._norm.load_state_dict(state["norm"])
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])
        self._largest = dict(state["largest"])


def _usual(windows: list[list[float]]) -> float:
    """The median norm of windows [median, first step, last step, rate]; 0 where they span too few steps."""
    enough = sum(item[2] - item[1] + 1 for item in windows) >= REFERENCE
    return median(np.array([item[0] for item in windows])) if enough else 0.0

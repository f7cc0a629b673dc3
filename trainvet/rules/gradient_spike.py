"""GR103: the gradient norm jumps far above everything it was for a long time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

BEFORE, LEAST, RUN, MOST, SPAN = 256, 96, 5, 3, 1000
TINY = 1e-12


@dataclasses.dataclass
class GradientSpike(Rule):
    """
    ## What it checks
    At least 3 of the last 5 gradient norms (before clipping) above the maximum of the 256 before them (96 at least), and their median above
    ``rise`` times the median of those and ``noises`` robust σ of their logarithms above it. Information; a warning at the ``often``-th spike
    within 1,000 steps.
    ## Why it matters
    Spikes of the gradient come before spikes of the loss, and show bad batches that the loss hardly does.
    ## What to do
    Look at the batches of the step named. Clip the gradient norm at its usual value; with Adam a lower beta2 (0.95) follows sudden gradients
    faster.
    ## Known limits
    The rank test holds for noise of any distribution as long as neighbouring norms are exchangeable. Silent before 96 measured norms and for
    ``pause`` steps after each spike. A norm that stays high is GR101's.
    """

    code = "GR103"
    reads: ClassVar[frozenset[str]] = frozenset({"run.gradient_norm", "optimizer.learning_rate"})
    causes = ("batches of unusual or bad data", "learning rate too high", "Adam underestimates the gradient's variance")
    fixes = ("clip the gradient norm", "look at the batches of these steps", "lower beta2 to 0.95")

    rise: float = 3.0
    noises: float = 5.0
    often: int = 3
    pause: int = 50

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rate = LearningRate()
        self._norm = Rollings(BEFORE + RUN, until=-1, spikes=[])

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The clipping threshold and the groups' rates are named in the advice."""
        self._facts = facts
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look at the last five norms after every new one."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._norm.add(snapshot, "run.gradient_norm"):
            begin, length = max(len(rows.values) - fresh, len(rows.values) - (rows.count - LEAST - RUN) - 1, RUN - 1), len(rows.values)
            if begin >= length:
                continue
            always = rows.values[max(0, length - RUN - BEFORE) : begin + 1 - RUN]  # before every row of this block: quick, mostly enough
            if (~(rows.values[begin + 1 - RUN :] <= always.max(initial=-np.inf))).sum() >= MOST:
                yield from self._look(name, rows, begin)

    def _look(self, name: str, rows: Rolling, begin: int) -> Iterator[Finding]:
        padded = np.concatenate([np.full(BEFORE, -np.inf), rows.values])
        last = sliding_window_view(rows.values, RUN)[begin + 1 - RUN :]
        highest = sliding_window_view(padded, BEFORE)[begin + 1 - RUN : len(rows.values) + 1 - RUN].max(axis=1)
        kept = rows.kept
        for place in (begin + np.flatnonzero((~(last <= highest[:, None])).sum(axis=1) >= MOST)).tolist():
            step, top = int(rows.steps[place]), float(highest[place - begin])
            now, before = rows.values[place + 1 - RUN : place + 1], rows.values[max(0, place + 1 - RUN - BEFORE) : place + 1 - RUN]
            middle = median(before)
            if step <= kept["until"] or median(now) <= self.rise * middle or not (middle > 0 and math.isfinite(top)):
                continue
            logs = np.log(np.maximum(before, TINY * middle) / middle)
            if np.log(median(now) / middle) <= self.noises * 1.4826 * median(np.abs(logs)):
                continue
            kept.update(until=step + self.pause, spikes=[*(item for item in kept["spikes"] if item > step - SPAN), step])
            many = len(kept["spikes"]) >= self.often
            first = int(rows.steps[place + 1 - RUN + int(np.argmax(~(now <= top)))])
            yield self._found(name, step, first, median(now), middle, top, many)
            kept["spikes"] = [] if many else kept["spikes"]

    def _found(self, name: str, step: int, first: int, now: float, before: float, top: float, many: bool) -> Finding:
        clipping = self._facts.clipping
        clip = f"clip the gradient norm at {before:.1g}, its usual value" + (f" (now {clipping:.3g})" if clipping else "")
        return self.finding(
            step,
            f"the gradient norm jumped from {before:.3g} to {now:.3g}" + (f"; {self.often} times in 1,000 steps" if many else ""),
            first_step=first,
            where=name,
            severity=Severity.WARNING if many else Severity.INFO,
            evidence={"norm": now, "before": before, "highest before": top},
            threshold=f"{MOST} of {RUN} norms above the {BEFORE} before, {self.rise:g} times their median",
            fixes=(clip, *self.fixes[1:], self._rate.advice(0.5, step=step)),
        )

    def missing(self) -> str:
        """How many norms there were."""
        return "" if self._norm.longest >= LEAST + RUN else f"{self._norm.longest} of {LEAST + RUN} measured steps"

    def state_dict(self) -> dict[str, Any]:
        """The last norms."""
        return {"norm": self._norm.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._norm.load_state_dict(state["norm"])
        self._rate.load_state_dict(state["rate"])

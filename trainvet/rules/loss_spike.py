"""LO102: the loss jumps above everything it was for a long time."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

BEFORE, LEAST, RUN, MOST, WINDOW = 256, 64, 5, 3, 20


@dataclasses.dataclass
class LossSpike(Rule):
    """
    ## What it checks
    At least 3 of the last 5 losses above the maximum of the 256 before them (64 at least), their median by ``noises`` robust σ above the median of
    those and by ``floor`` of the progress made so far. Info if 3 of 5 are back under that maximum within ``within`` steps; a warning if
    they are not, or at the third spike in 1,000 steps.
    ## Why it matters
    A spike that heals costs a few steps. One that does not has thrown the weights out of their valley; spikes that come often end that way.
    ## What to do
    Look at the batches named by the step. Clip the gradient norm; with Adam a lower beta2 (0.95) follows sudden gradients faster.
    ## Known limits
    The rank test holds for noise of any distribution (3.4e-6 per step for a full window) as long as neighbouring losses are exchangeable. A spike is
    told when it is over or has lasted ``within`` steps; then the rule is silent until ``within`` steps after it began. A sustained rise is LO101's.
    """

    code = "LO102"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate"})
    causes = ("a batch of unusual or bad data", "learning rate too high", "Adam underestimates the gradient's variance", "growing attention logits")
    fixes = ("look at the batches of these steps", "clip the gradient norm at 1", "lower beta2 to 0.95", "lower the learning rate")

    noises: float = 5.0
    floor: float = 0.05
    within: int = 50
    often: int = 3

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._loss = Rollings(BEFORE + RUN, start=0.0, best=0.0, spike={}, until=0, spikes=[])

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The groups' rates are named in the advice."""
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look for the beginning or the end of a spike among the new rows; after every 20 of them, see how far the loss has come."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            kept, begin = rows.kept, len(rows.values) - fresh
            for end in dict.fromkeys((*rows.windows(fresh, WINDOW), len(rows.values))):
                if rows.total(end) >= LEAST + RUN:
                    yield from self._judge(name, rows, begin, end)
                if rows.total(end) % WINDOW == 0:
                    now = median(rows.values[end - WINDOW : end])
                    first = rows.total(end) == WINDOW
                    kept.update(start=median(rows.values[:10]) if first else kept["start"], best=now if first else min(kept["best"], now))
                begin = end

    def _judge(self, name: str, rows: Rolling, begin: int, end: int) -> Iterable[Finding]:
        begin = max(begin, RUN)
        always = rows.values[max(0, end - RUN - BEFORE) : begin + 1 - RUN]  # before every row of this block: quick to look at, mostly enough
        if not rows.kept["spike"] and (~(rows.values[begin + 1 - RUN : end] <= always.max(initial=-np.inf))).sum() < MOST:
            return
        padded = np.concatenate([np.full(BEFORE, -np.inf), rows.values[:end]])
        last = sliding_window_view(rows.values[:end], RUN)[begin + 1 - RUN :]
        highest = sliding_window_view(padded, BEFORE)[begin + 1 - RUN : end + 1 - RUN].max(axis=1)
        standing = np.flatnonzero((~(last <= highest[:, None])).sum(axis=1) >= MOST)
        while begin < end:
            if rows.kept["spike"]:
                begin = yield from self._follow(name, rows, begin, end)
                continue
            rising = standing[standing >= begin - end + len(last)]
            if not len(rising):
                return
            self._start(rows, end - len(last) + int(rising[0]), float(highest[rising[0]]))
            begin = end - len(last) + int(rising[0]) + 1

    def _start(self, rows: Rolling, place: int, highest: float) -> None:
        """A spike begins where the five rows up to ``place`` stand out by enough."""
        total, kept = rows.total(place + 1), rows.kept
        now, before = rows.values[place + 1 - RUN : place + 1], rows.values[max(0, place + 1 - RUN - BEFORE) : place + 1 - RUN]
        middle = median(before)
        sigma = 1.4826 * median(np.abs(before - middle))
        limit = middle + max(self.noises * sigma, self.floor * (kept["start"] - kept["best"]))
        if total >= max(LEAST + RUN, kept["until"]) and not median(now) <= limit:
            first = int(rows.steps[place + 1 - RUN + int(np.argmax(~(now <= highest)))])
            kept.update(until=total + self.within, spike={"first": first, "highest": highest, "before": middle, "loss": median(now), "noise": sigma})

    def _follow(self, name: str, rows: Rolling, begin: int, end: int) -> Generator[Finding, None, int]:
        """Tell the present spike when it is over or has lasted too long; the position after that, or ``end``."""
        kept, spike = rows.kept, rows.kept["spike"]
        stays = (~(sliding_window_view(rows.values[:end], RUN)[begin + 1 - RUN :] <= spike["highest"])).sum(axis=1) >= MOST
        over: int = min([kept["until"] - rows.total(begin + 1), *(int(place) for place in np.flatnonzero(~stays)[:1])])
        if over >= len(stays):
            return end
        total, step = rows.total(begin + over + 1), int(rows.steps[begin + over])
        recent = [*(row for row in kept["spikes"] if row > total - 1000), total]
        many = len(recent) >= self.often
        kept.update(spike={}, spikes=[] if many else recent)
        course = f"has stayed there for {self.within} steps" if stays[over] else f"was back after {step - spike['first']} steps"
        yield self.finding(
            step,
            f"the loss jumped from {spike['before']:.3g} to {spike['loss']:.3g} and {course}"
            + (f"; {len(recent)} times in 1,000 steps" if many else ""),
            first_step=spike["first"],
            where=name,
            severity=Severity.WARNING if stays[over] or many else Severity.INFO,
            evidence={key.replace("highest", "highest before"): spike[key] for key in ("loss", "before", "highest", "noise")},
            threshold=f"{MOST} of {RUN} losses above the {BEFORE} before, by {self.noises:g} times the noise and {self.floor:.0%} of the progress",
            fixes=(*self.fixes[:3], self._rate.advice(0.5, step=step)),
        )
        return begin + over + 1

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._loss.longest >= LEAST + RUN else f"{self._loss.longest} of {LEAST + RUN} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows."""
        return {"loss": self._loss.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])

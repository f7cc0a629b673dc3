"""LO101: the loss rises above its start, or gives back what was learnt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings, level
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot, Vector

WINDOW, HISTORY, LAG = 20, 200, 15
MEMORY = 0.95  # of the noise, from window to window: 200 rows of correlated noise now and then look calmer than they are


@dataclasses.dataclass
class RunawayLoss(Rule):
    """
    ## What it checks
    The median of 20 steps, in ``patience`` windows in a row. Error: above the start (median of the first 10 losses) by more than ``noises`` times its
    noise and ``floor`` of the start. Warning: more than ``returned`` of the progress made so far is given back, by the same margins.
    ## Why it matters
    Training makes the model worse: it does not come back by itself, and the next thing is often NaN.
    ## What to do
    Lower the learning rate or warm it up; go back to a checkpoint from before the rise. A loss that rises from the first step on has the wrong sign,
    or gradients that are never cleared.
    ## Known limits
    Silent before step 40. The noise of a median is 1.25 σ/√20, σ from the first differences, and more where the noise is correlated over steps
    (seen in differences over 15 steps, and remembered for some windows). A loss whose definition changes during the run (curriculum, growing
    penalty) may rise for that reason.
    """

    code = "LO101"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value", "optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = (
        "learning rate too high, or no warm-up",
        "loss with the wrong sign",
        "gradients that are not cleared between steps",
        "a batch of bad data",
    )
    fixes = ("lower the learning rate", "clip the gradient norm at 1", "go back to a checkpoint from before the rise")

    noises: float = 6.0
    floor: float = 0.05
    returned: float = 0.5
    patience: int = 2

    def __post_init__(self) -> None:
        self._rate = LearningRate()
        self._loss = Rollings(HISTORY, start=0.0, spread=0.0, best=0.0, noise=0.0, bad=0, worse=0, good=0, first=0, told=0)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The groups' rates are named in the advice."""
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every window of 20 rows that is complete with this snapshot."""
        self._rate.follow(snapshot)
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            for end in rows.windows(fresh, WINDOW):
                yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterable[Finding]:
        kept, window = rows.kept, rows.values[end - WINDOW : end]
        now = median(window)
        if rows.total(end) == WINDOW:
            kept.update(start=median(window[:10]), spread=float(window.max() - window.min()), best=now)
        rows_seen = rows.values[max(0, end - HISTORY - 1) : end]
        kept["noise"] = max(noise_of_rises(rows_seen), MEMORY * kept["noise"])
        noise = self.noises * max(noise_of_median(rows_seen), kept["noise"])
        start, best, floor = kept["start"], kept["best"], self.floor * abs(kept["start"])
        spread = self.noises * kept["spread"] or noise
        worse = not now - start <= max(min(noise, spread), floor)  # an explosion may be all the noise there is: the first window's is known
        back = best < start and not now - best <= max(self.returned * (start - best), noise, floor)
        kept["best"] = min(best, now)
        if not (worse or back):
            kept.update(bad=0, worse=0, good=kept["good"] + 1)
            kept["told"] = 0 if kept["good"] >= self.patience else kept["told"]
            return
        first = kept["first"] if kept["bad"] else int(rows.steps[end - WINDOW])
        kept.update(bad=kept["bad"] + 1, worse=kept["worse"] + 1 if worse else 0, good=0, first=first)
        severity = Severity.ERROR if kept["worse"] >= self.patience else Severity.WARNING
        if kept["bad"] < self.patience or kept["told"] >= severity:
            return
        kept["told"] = int(severity)
        step = int(rows.steps[end - 1])
        share = (now - best) / (start - best) if best < start else np.nan
        what = (
            f"{now:.3g}, worse than at the start ({start:.3g})"
            if severity > Severity.WARNING
            else f"{now:.3g}: {share:.0%} of the progress is given back"
        )
        yield self.finding(
            step,
            f"the loss has risen to {what}",
            first_step=kept["first"],
            where=name,
            severity=severity,
            evidence={"loss": now, "start": start, "lowest": best, "noise": noise / self.noises},
            threshold=f"{self.noises:g} times the noise and {self.floor:.0%} of the start, in {self.patience} windows of {WINDOW} steps",
            fixes=(self._rate.advice(0.1, step=step), self._rate.warm_up(), *self.fixes[1:]),
        )

    def missing(self) -> str:
        """How many steps there were."""
        needed = WINDOW * self.patience
        return "" if self._loss.longest >= needed else f"{self._loss.longest} of {needed} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows."""
        return {"loss": self._loss.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])


def noise_of_median(values: Vector) -> float:
    """The standard deviation of a median of 20 of these values, float64 [T], T >= 20.

    Where the noise is correlated over steps it is that of an AR(1) process with the same differences over 1 and 15 steps.
    """
    near = values[-100:] - values[-101:-1] if len(values) > 100 else values[1:] - values[:-1]
    near_sigma = level(np.abs(near - median(near)), 0.9) / 1.645
    far = values[LAG:] - values[:-LAG] if len(values) > 2 * LAG else near
    far_sigma = median(np.abs(far - median(far))) / 0.6745
    alone = 1.25 * near_sigma / math.sqrt(WINDOW)
    if far_sigma <= near_sigma:
        return alone
    return min(alone * (far_sigma / near_sigma) ** 2, far_sigma) if near_sigma > 0 else far_sigma


def noise_of_rises(values: Vector) -> float:
    """The same from the rises over 15 steps alone, which a falling loss does not have but for its noise; 0 for fewer than 100 values."""
    far = values[LAG:] - values[:-LAG]
    near = values[1:] - values[:-1]
    near_sigma, far_sigma = (max(0.0, level(change, 0.75)) / 0.6745 if len(values) >= 100 else 0.0 for change in (near, far))
    if not far_sigma > near_sigma > 0:
        return 0.0
    return min(1.25 * near_sigma / math.sqrt(WINDOW) * (far_sigma / near_sigma) ** 2, far_sigma)

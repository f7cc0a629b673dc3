"""AC101: most units of a ReLU layer never respond."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector

UNITS = 8


@dataclasses.dataclass
class DeadRelu(Rule):
    """
    ## What it checks
    The share of a ReLU layer's units that were never above 0 in a window of several batches. A warning above ``share`` in a window of ``positions``
    if that is ``growth`` more than in the first such window; an error above ``most`` already in ``enough`` positions, or if a whole layer is 0 on
    ``batches`` samples in a row.
    ## Why it matters
    A unit that is 0 everywhere gets no gradient and cannot come back: the layer has lost that part of its width for good.
    ## What to do
    Look for the step at which the share rose: a too large update before it is the usual cause. Restart with a lower rate or a warm-up.
    ## Known limits
    Units that are rare but alive look dead in few positions, hence the windows and the growth: large healthy transformers have layers with over
    70 % silent units. Gates and experts do not count. A window lasts at least 5 batches and 1,000 positions (batch times places).
    """

    code = "AC101"
    reads: ClassVar[frozenset[str]] = frozenset(
        {"activation.dead_share", "activation.batches", "activation.positions", "activation.max", "optimizer.learning_rate"}
    )
    causes = ("a too large update pushed the biases below reach", "large negative biases", "unnormalised inputs", "too large initial weights")
    fixes = (
        "warm the learning rate up over the first steps",
        "start biases at 0 and normalise the inputs",
        "use LeakyReLU or GELU, or put a normalisation layer in front",
    )

    share: float = 0.5
    growth: float = 0.2
    most: float = 0.9
    rearm: float = 0.4
    batches: int = 5
    positions: int = 1000
    enough: int = 300

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._broad: frozenset[str] = frozenset()
        self._none = False
        self._rate = LearningRate()
        self._kept = PerSubject(first=np.nan, since=np.nan, told=0.0)
        self._zero = Streak(self.batches)
        self._windows, self._start = 0, -1

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers are ReLU."""
        self._facts = facts
        self._rate.begin(facts)
        sites = facts.of("activation").items()
        self._none = bool(sites) and not any(item.function in ("relu", "relu6") for _, item in sites)
        # a whole layer at 0 means something from several units on
        self._broad = frozenset(name for name, item in sites if not item.shape or item.numel >= UNITS * item.shape[0])
        self._rows.choose(name for name, item in sites if item.function in ("relu", "relu6") and item.role not in ("gate", "expert"))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the layers whose window is wide enough by now, and those that are 0 throughout."""
        self._rate.follow(snapshot)
        column = snapshot.column("activation.dead_share")
        if column is None or not self._rows.find(column[0]):
            return
        names = self._rows.names
        self._start = snapshot.step if self._start < 0 else self._start
        dead, batches, positions, top = (self._rows.values(snapshot, f"activation.{key}") for key in ("dead_share", "batches", "positions", "max"))
        rows, kept = self._kept.rows(names), self._kept
        wide = (batches >= self.batches) & (positions >= self.positions)
        seen = (batches >= self.batches) & (positions >= self.enough)
        alive = seen & (dead < self.rearm) & ~(top <= 0)  # a window may be older than the death of its layer
        self._windows += bool(seen.any())
        first = np.where(wide & np.isnan(kept["first"][rows]), dead, kept["first"][rows])
        since = np.where((batches <= 1) | np.isnan(kept["since"][rows]), snapshot.step, kept["since"][rows])
        warn = wide & (dead > self.share) & (dead - first >= self.growth)
        level = np.where(seen & (dead > self.most), Severity.ERROR, np.where(warn, Severity.WARNING, 0))
        zero = self._zero.update(names, (top <= 0) & np.array([name in self._broad for name in names]), snapshot.step, clear=alive)
        self._windows += bool(zero)
        level[zero], dead, positions = Severity.ERROR, dead.copy(), positions.copy()
        dead[zero], positions[zero] = 1.0, 0.0
        since[zero] = [self._zero.first(names[index]) for index in zero]
        told = np.where(alive, 0, kept["told"][rows])
        fresh = level > told
        kept["first"][rows], kept["since"][rows], kept["told"][rows] = first, since, np.maximum(told, level)
        for severity in (Severity.ERROR, Severity.WARNING):
            due = np.flatnonzero(fresh & (level == severity))
            if len(due):
                yield self._tell(snapshot, severity, [names[index] for index in due], dead[due], positions[due], int(since[due].min()))

    def _tell(self, snapshot: Snapshot, severity: Severity, names: list[str], dead: Vector, positions: Vector, since: int) -> Finding:
        worst = int(np.argmax(dead))
        span = f"in {positions[worst]:.0f} positions of several batches" if positions[worst] else f"on {self.batches} samples in a row"
        return self.finding(
            snapshot.step,
            f"{dead[worst]:.0%} of the units were never above 0 {span} ({names[worst]})",
            first_step=since,
            subjects=self._facts.upstream_first(names),
            severity=severity,
            evidence={"dead share": float(dead[worst]), "layers": len(names)},
            threshold=f"above {self.share:.0%} and {self.growth:.0%} more than at first, error above {self.most:.0%} or a whole layer",
            causes=self.causes[1:] if since == self._start else self.causes,
            fixes=self.fixes[1:] if since == self._start else (self._rate.advice(0.1), *self.fixes),
        )

    def missing(self) -> str:
        """Is any window wide enough to judge?"""
        if self._none:
            return "no ReLU layer was seen"
        return "" if self._windows else f"a window of {self.batches} batches and {self.enough} positions"

    def state_dict(self) -> dict[str, Any]:
        """The running windows and streaks."""
        return {
            "kept": self._kept.state_dict(),
            "zero": self._zero.state_dict(),
            "windows": self._windows,
            "start": self._start,
            "rate": self._rate.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._zero.load_state_dict(state["zero"])
        self._rate.load_state_dict(state["rate"])
        self._windows, self._start = int(state["windows"]), int(state["start"])

"""GR101: the gradient norm has grown out of its own history."""

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

HISTORY, FIRST, LAST = 1000, 20, 120


@dataclasses.dataclass
class ExplodingGradient(Rule):
    """
    ## What it checks
    The total gradient norm, unscaled and before clipping. The median of a window is more than ``rise`` times the reference, ``patience`` windows in
    a row; the reference is the median of steps 20 to 120, later of the last 1,000 norms. And: the largest norm of the first 10 steps is more than
    ``start`` times the median of steps 20 to 120, an explosion that is over when one looks.
    ## Why it matters
    One huge step throws away what was learnt; the units it kills stay dead.
    ## What to do
    Clip the norm at the value named, lower the learning rate or warm it up; recurrent nets and stacks without normalisation need a smaller start.
    ## Known limits
    Silent before step 140. A window has 20 steps, or 5 samples where norms are measured on samples only. Highest healthy rise measured: 1.94, highest
    healthy start: 14.9. Warning only where gradients are clipped.
    """

    code = "GR101"
    reads: ClassVar[frozenset[str]] = frozenset({"run.gradient_norm", "gradient.norm", "optimizer.learning_rate"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = (
        "learning rate too high, or no warm-up",
        "initial weights too large, or a recurrent net without clipping",
        "inputs or targets on a large scale",
    )
    fixes = ("scale inputs and targets to about unit size", "start from smaller weights: orthogonal or Glorot initialisation")

    rise: float = 5.0
    patience: int = 2
    start: float = 100.0

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rate = LearningRate()
        self._norm = Rollings(HISTORY + FIRST, early=[], seen=0, reference=0.0, peak=0.0, peak_step=0, bad=0, first=0, told=False, start_told=False)
        self._largest: dict[str, str] = {"first": "", "now": ""}
        self._highest = 0.0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Clipping and density of the norms."""
        self._facts = facts
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every window that is complete with this snapshot."""
        self._rate.follow(snapshot)
        column = snapshot.column("gradient.norm")
        if column is not None and len(column[0]):
            self._largest["now"] = column[0][int(np.argmax(column[1]))]
            if snapshot.step < 10 and float(column[1].max()) >= self._highest:
                self._highest, self._largest["first"] = float(column[1].max()), self._largest["now"]
        window = 20 if self._facts.every_step else 5
        for _, rows, fresh in self._norm.add(snapshot, "run.gradient_norm"):
            yield from self._start(rows, fresh)
            for end in rows.windows(fresh, window):
                if end >= window:
                    yield from self._judge(rows, end, window)

    def _start(self, rows: Rolling, fresh: int) -> Iterable[Finding]:
        kept = rows.kept
        if kept["reference"]:
            return
        for step, norm in zip(rows.steps[-fresh:].tolist(), rows.values[-fresh:].tolist(), strict=True):
            if step < 10 and norm > kept["peak"]:
                kept.update(peak=norm, peak_step=step)
            if FIRST <= step < LAST:
                kept["early"].append(norm)
            elif step >= LAST and not kept["reference"]:
                kept["reference"] = float(np.median(kept["early"])) if len(kept["early"]) >= 5 else np.inf
                kept["early"] = []
                if 0 < kept["reference"] < np.inf and kept["peak"] > self.start * kept["reference"]:
                    text = f"the gradient norm was {kept['peak']:.3g} at step {kept['peak_step']} and settled at {kept['reference']:.3g}"
                    yield self._tell(step, kept["peak_step"], text, kept["peak"], kept["reference"], f"{self.start:g} times", self._largest["first"])

    def _judge(self, rows: Rolling, end: int, window: int) -> Iterable[Finding]:
        kept = rows.kept
        first = int(rows.steps[end - window])
        if not 0 < kept["reference"] < np.inf or first < LAST:
            return
        before = rows.values[max(0, end - window - HISTORY) : end - window]
        reference = max(median(before), 0.2 * kept["reference"]) if len(before) >= HISTORY else kept["reference"]
        now = median(rows.values[end - window : end])
        if not now > self.rise * reference:
            kept.update(bad=0, told=False)
            return
        kept.update(bad=kept["bad"] + 1, first=kept["first"] if kept["bad"] else first)
        if kept["bad"] >= self.patience and not kept["told"]:
            kept["told"] = True
            text = f"the gradient norm has risen to {now:.3g}, {now / reference:.1f} times its median so far"
            yield self._tell(int(rows.steps[end - 1]), kept["first"], text, now, reference, f"{self.rise:g} times", self._largest["now"])

    def _tell(self, step: int, first: int, text: str, norm: float, reference: float, limit: str, largest: str) -> Finding:
        return self.finding(
            step,
            text,
            first_step=first,
            subjects=[largest] if largest else [],
            where=f"gradient norm, largest at {largest}" if largest else "gradient norm",
            severity=Severity.WARNING if self._facts.clipping > 0 else Severity.ERROR,
            evidence={"gradient norm": norm, "reference": reference, "clipped at": self._facts.clipping},
            threshold=limit,
            fixes=(f"clip the gradient norm at {reference:.2g}", self._rate.advice(0.1, step=step), self._rate.warm_up(), *self.fixes),
        )

    def missing(self) -> str:
        """How many norms there were."""
        newest = max((int(rows.steps[-1]) for rows in self._norm.all() if len(rows.steps)), default=-1)
        return "" if newest >= LAST + FIRST else f"step {newest + 1} of {LAST + FIRST}"

    def state_dict(self) -> dict[str, Any]:
        """The last norms."""
        return {"norm": self._norm.state_dict(), "rate": self._rate.state_dict(), "largest": dict(self._largest), "highest": self._highest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._norm.load_state_dict(state["norm"])
        self._rate.load_state_dict(state["rate"])
        self._largest, self._highest = dict(state["largest"]), float(state["highest"])

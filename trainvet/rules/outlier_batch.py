"""LO103: one batch has a loss far outside everything seen for a long time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Snapshot

BEFORE, LEAST, WINDOW = 256, 64, 20


@dataclasses.dataclass
class OutlierBatch(Rule):
    """
    ## What it checks
    A single loss whose distance from the median of the 256 before it (64 at least) is more than ``factor`` times that of their largest, and more
    than ``floor`` of the progress made so far. Information.
    ## Why it matters
    Corrupt samples, wrong labels and broken augmentation show first as single batches; each pulls the weights the wrong way.
    ## What to do
    Look at the samples of the batch named, and at the worker that loaded them.
    ## Known limits
    Heavy-tailed losses have such batches in good health (about one in 20,000 steps). Silent for ``pause`` steps after each one told.
    """

    code = "LO103"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("a batch of corrupt samples or wrong labels", "a rare kind of sample")
    fixes = ("look at the samples of this batch", "clip the gradient norm at 1, so that one batch cannot do much harm")

    factor: float = 3.0
    floor: float = 0.05
    pause: int = 50

    def __post_init__(self) -> None:
        self._loss = Rollings(BEFORE, start=0.0, best=0.0, until=0)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look at every new row that is a maximum; after every 20 rows, see how far the loss has come."""
        for name, rows, fresh in self._loss.add(snapshot, "loss.value"):
            begin = len(rows.values) - fresh
            for end in dict.fromkeys((*rows.windows(fresh, WINDOW), len(rows.values))):
                yield from self._look(name, rows, begin, end)
                if rows.total(end) % WINDOW == 0:
                    now, first = median(rows.values[end - WINDOW : end]), rows.total(end) == WINDOW
                    rows.kept["start"] = median(rows.values[:10]) if first else rows.kept["start"]
                    rows.kept["best"] = now if first else min(rows.kept["best"], now)
                begin = end

    def _look(self, name: str, rows: Rolling, begin: int, end: int) -> Iterator[Finding]:
        begin = max(begin, end - (rows.total(end) - LEAST))
        if begin >= end:
            return
        padded = np.concatenate([np.full(BEFORE, -np.inf), rows.values[:end]])
        highest = sliding_window_view(padded, BEFORE)[begin:end].max(axis=1)
        for place in (begin + np.flatnonzero(~(rows.values[begin:end] <= highest))).tolist():
            value, before, kept = float(rows.values[place]), rows.values[max(0, place - BEFORE) : place], rows.kept
            middle, top = median(before), float(before.max())
            limit = middle + max(self.factor * (top - middle), self.floor * (kept["start"] - kept["best"]))
            if rows.total(place + 1) < kept["until"] or not value > limit or not top > middle:
                continue
            kept["until"] = rows.total(place + 1) + self.pause
            step = int(rows.steps[place])
            yield self.finding(
                step,
                f"the loss of one batch was {value:.3g}; the {len(before)} before it reached {top:.3g}, {middle:.3g} in the median",
                where=f"{name}, step {step}",
                evidence={"loss": value, "median before": middle, "highest before": top},
                threshold=f"{self.factor:g} times as far from the median as the highest before, and {self.floor:.0%} of the progress",
            )

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._loss.longest > LEAST else f"{self._loss.longest} of {LEAST + 1} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's last rows."""
        return {"loss": self._loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])

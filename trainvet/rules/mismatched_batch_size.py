"""FT104: the batch is far larger or smaller than the noise of the gradient asks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Snapshot

ESTIMATES = 50


@dataclasses.dataclass
class MismatchedBatchSize(Rule):
    """
    ## What it checks
    The median of 50 estimates of the gradient noise scale (the batch size beyond which more samples hardly improve a step) against the samples
    per step: more than ``factor`` times larger or smaller. Information, once for each direction.
    ## Why it matters
    A batch far above the noise scale wastes samples, one far below it takes many small steps that mostly follow noise (McCandlish et al. 2018).
    ## What to do
    Too large: take a smaller batch for more steps. Too small: a larger one, or accumulate, with a learning rate raised to match.
    ## Known limits
    Needs gradient accumulation: the estimate compares a part of the batch with the whole. Single estimates scatter widely; the noise scale grows
    during training.
    """

    code = "FT104"
    reads: ClassVar[frozenset[str]] = frozenset({"run.noise_scale", "run.batch_size"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("a batch size chosen for memory or speed rather than for the gradient's noise",)
    fixes = ("change the batch size towards the noise scale, and the learning rate with it",)

    factor: float = 10.0

    def __post_init__(self) -> None:
        self._noise = Rollings(ESTIMATES, told=[])
        self._size = Rollings(ESTIMATES)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every 50 estimates."""
        for _ in self._size.add(snapshot, "run.batch_size"):
            pass
        for name, rows, fresh in self._noise.add(snapshot, "run.noise_scale"):
            for end in rows.windows(fresh, ESTIMATES):
                yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        step, noise = int(rows.steps[end - 1]), median(rows.values[end - ESTIMATES : end])
        sizes = next((size.values[size.steps <= step][-ESTIMATES:] for size in self._size.all()), rows.values[:0])
        size = median(sizes) if len(sizes) else math.nan
        if not (noise > 0 and size > 0 and math.isfinite(noise) and math.isfinite(size)):
            return
        what = "larger" if size > self.factor * noise else "smaller" if size < noise / self.factor else ""
        if not what or what in rows.kept["told"]:
            return
        rows.kept["told"].append(what)
        advice = "use a smaller batch for more steps" if what == "larger" else "use a larger batch, or accumulate more"
        yield self.finding(
            step,
            f"{size:.0f} samples in a step are much {what} than the gradient's noise scale of {noise:.2g}",
            first_step=int(rows.steps[end - ESTIMATES]),
            where=name,
            evidence={"samples": size, "noise scale": noise},
            threshold=f"a factor of {self.factor:g}, median of {ESTIMATES} estimates",
            fixes=(f"{advice}: about {noise:.1g} samples, and a learning rate to match",),
        )

    def missing(self) -> str:
        """How many estimates there were."""
        return "" if self._noise.longest >= ESTIMATES else f"{self._noise.longest} of {ESTIMATES} estimates (they need gradient accumulation)"

    def state_dict(self) -> dict[str, Any]:
        """The last estimates."""
        return {"noise": self._noise.state_dict(), "size": self._size.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._noise.load_state_dict(state["noise"])
        self._size.load_state_dict(state["size"])

"""GR105: nearly every step is clipped, to a small part of its gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

STEPS, SAMPLES = 200, 20


@dataclasses.dataclass
class SaturatedClipping(Rule):
    """
    ## What it checks
    In a stretch of 200 steps (20 measured ones where not every step is) more than ``clipped`` are clipped, and the median of the scale is below
    ``scale``: information; below ``severe`` a warning.
    ## Why it matters
    Clipping is there for the odd large gradient. Where it acts on every step it sets the step's length: with SGD the learning rate is then a
    hundredth of the one that was written down.
    ## What to do
    Raise the threshold to about the usual norm, or lower the learning rate's schedule to what really happens.
    ## Known limits
    Adam divides by the gradient's size: clipping changes little there, and is a warning only where clipped elements sink below 10 times its
    epsilon. Told again after a stretch without it. Clipping at a fixed small norm is custom in reinforcement learning.
    """

    code = "GR105"
    reads: ClassVar[frozenset[str]] = frozenset({"run.clip_scale", "run.gradient_norm"})
    causes = ("a clipping threshold far below the usual norm of the gradient", "a loss or targets on a large scale", "gradients that explode")
    fixes = ("raise the clipping threshold to the usual norm of the gradient",)

    clipped: float = 0.9
    scale: float = 0.1
    severe: float = 0.01

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._norm = Rollings(STEPS)
        self._clip = Rollings(STEPS, told=0)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The threshold and the optimizers."""
        self._facts = facts
        return ()

    @property
    def _stretch(self) -> int:
        return STEPS if self._facts.every_step else SAMPLES

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every stretch that is complete with this snapshot."""
        for _ in self._norm.add(snapshot, "run.gradient_norm"):
            pass
        for name, rows, fresh in self._clip.add(snapshot, "run.clip_scale"):
            for end in rows.windows(fresh, self._stretch):
                yield from self._judge(name, rows, end)

    def _judge(self, name: str, rows: Rolling, end: int) -> Iterator[Finding]:
        values = rows.values[end - self._stretch : end]
        first, step = int(rows.steps[end - self._stretch]), int(rows.steps[end - 1])
        share, scale = float((values < 1).mean()), median(values)
        if not (share > self.clipped and scale < self.scale):
            rows.kept["told"] = 0
            return
        norm = self._usual(first, step)
        severity = Severity.WARNING if scale < self.severe and self._harms(norm * scale) else Severity.INFO
        if rows.kept["told"] >= severity:
            return
        rows.kept["told"] = int(severity)
        threshold = self._facts.clipping
        now = f" (now {threshold:.3g})" if threshold else ""
        yield self.finding(
            step,
            f"{share:.0%} of {len(values)} steps were clipped, to {scale:.2g} of their gradient in the median",
            first_step=first,
            where=name,
            severity=severity,
            evidence={"clipped": share, "scale": scale} | ({"gradient norm": norm} if norm > 0 else {}),
            threshold=f"{self.clipped:.0%} clipped and a scale of {self.scale:g}, a warning below {self.severe:g}",
            fixes=(f"set the clipping threshold to about {norm:.1g}, the usual norm{now}",) if 0 < norm < math.inf else None,
        )

    def _usual(self, first: int, step: int) -> float:
        """The median norm before clipping within the stretch; NaN where it was not measured."""
        for rows in self._norm.all():
            values = rows.values[(rows.steps >= first) & (rows.steps <= step)]
            if len(values):
                return median(values)
        return math.nan

    def _harms(self, clipped: float) -> bool:
        """Adam undoes a scale, unless the clipped elements come near its epsilon; NaN where the norm is not known."""
        adam = [item for item in self._facts.optimizers if item.family == "adam"]
        if len(adam) < max(1, len(self._facts.optimizers)):
            return True
        count = sum(subject.numel for name, subject in self._facts.parameters.items() if name in self._facts.owned)
        return count > 0 and clipped / math.sqrt(count) < 10 * max(item.epsilon for item in adam)

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._clip.longest >= self._stretch else f"{self._clip.longest} of {self._stretch} steps with clipping"

    def state_dict(self) -> dict[str, Any]:
        """The last rows."""
        return {"clip": self._clip.state_dict(), "norm": self._norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._clip.load_state_dict(state["clip"])
        self._norm.load_state_dict(state["norm"])

"""LO111: the run ends while the loss is still falling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.matrices import median
from trainvet.rolling import Rolling, Rollings
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

BLOCK, MOST, LEAST = 10, 96, 12


@dataclasses.dataclass
class UnfinishedTraining(Rule):
    """
    ## What it checks
    When the run ends as planned: the loss has fallen in its last third at least ``share`` times as much as in the middle third, and by more than
    twice its noise and ``drop`` of the level. Information.
    ## Why it matters
    Longer training would have helped, and comparisons of such runs compare how fast they started.
    ## What to do
    Train longer, or raise the learning rate.
    ## Known limits
    Not judged: runs that were stopped before their planned end, and fewer than 120 steps. Loss only: the validation metric may say otherwise
    (FT101).
    """

    code = "LO111"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = ("the run is short for this learning rate", "learning rate too low")
    fixes = ("train longer", "raise the learning rate")

    share: float = 1.0
    drop: float = 0.02

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._loss = Rollings(BLOCK, width=1, part=[], blocks=[])

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The run's length."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Take over medians of ten rows; when there are 96 of them, each two become one."""
        for _, rows, fresh in self._loss.add(snapshot, "loss.value"):
            kept = rows.kept
            for end in rows.windows(fresh, BLOCK):
                kept["part"].append(median(rows.values[end - BLOCK : end]))
                if len(kept["part"]) == kept["width"]:
                    kept["blocks"].append(sum(kept["part"]) / kept["width"])
                    kept["part"] = []
                if len(kept["blocks"]) == MOST:
                    blocks = kept["blocks"]
                    kept["blocks"] = [(one + two) / 2 for one, two in zip(blocks[::2], blocks[1::2], strict=True)]
                    kept["width"] *= 2
        return ()

    def end(self, step: int) -> Iterable[Finding]:
        """Compare the thirds."""
        planned = self._facts.planned_steps
        if planned is not None and step < 0.98 * planned:
            return
        for name, rows in self._loss.items():
            if len(rows.kept["blocks"]) >= LEAST:
                yield from self._judge(name, rows, step)

    def _judge(self, name: str, rows: Rolling, step: int) -> Iterator[Finding]:
        blocks = np.array(rows.kept["blocks"])
        third = len(blocks) // 3
        middle, last = blocks[-2 * third : -third], blocks[-third:]
        fell = [_fall(part) for part in (middle, last)]
        noise = _noise(last)
        level = abs(median(last))
        if not (fell[1] >= self.share * fell[0] > 0 and fell[1] > max(2 * noise, self.drop * level)) or not math.isfinite(fell[1]):
            return
        yield self.finding(
            step,
            f"the loss still falls as the run ends: by {fell[1]:.3g} in the last third of the steps, {fell[0]:.3g} in the one before",
            first_step=min(step, int(rows.steps[-1])),
            where=name,
            evidence={"last third": fell[1], "middle third": fell[0], "loss": float(blocks[-1])},
            threshold=f"{self.share:g} times the fall of the middle third",
            fixes=(f"train longer: {2 * (self._facts.planned_steps or step)} steps", self.fixes[1]),
        )

    def missing(self) -> str:
        """How many steps there were."""
        return "" if self._loss.longest >= BLOCK * LEAST else f"{self._loss.longest} of {BLOCK * LEAST} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """Each loss's blocks."""
        return {"loss": self._loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss.load_state_dict(state["loss"])


def _fall(part: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """How far the least-squares line through the blocks falls."""
    time = np.arange(len(part)) - (len(part) - 1) / 2
    return -float(time @ (part - part.mean())) / float(time @ time) * len(part)


def _noise(part: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The standard error of :func:`_fall`, from neighbouring blocks."""
    steps = np.diff(part)
    sigma = float(np.sqrt(((steps - steps.mean()) ** 2).mean() / 2))
    time = np.arange(len(part)) - (len(part) - 1) / 2
    return sigma / math.sqrt(float(time @ time)) * len(part)

"""AC101: most units of a ReLU layer never respond."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.dead_units import READS, Dead, DeadUnits, Limits, broad
from trainvet.finding import Finding
from trainvet.learning_rate import LearningRate
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

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
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate"}
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
        self._none = False
        self._rate = LearningRate()
        self._units = DeadUnits(Limits(self.share, self.growth, self.most, self.rearm, self.batches, self.positions, self.enough))

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers are ReLU."""
        self._facts = facts
        self._rate.begin(facts)
        sites = facts.of("activation").items()
        self._none = bool(sites) and not any(item.function in ("relu", "relu6") for _, item in sites)
        judged = [name for name, item in sites if item.function in ("relu", "relu6") and item.role not in ("gate", "expert")]
        self._units.choose(judged, broad(facts, UNITS))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the layers whose window is wide enough by now, and those that are 0 throughout."""
        self._rate.follow(snapshot)
        for dead in self._units.judge(snapshot):
            yield self._tell(snapshot, dead)

    def _tell(self, snapshot: Snapshot, dead: Dead) -> Finding:
        share, early = float(dead.share[dead.worst]), dead.since == self._units.start
        return self.finding(
            snapshot.step,
            f"{share:.0%} of the units were never above 0 {dead.span(self.batches)} ({dead.names[dead.worst]})",
            first_step=dead.since,
            subjects=self._facts.upstream_first(dead.names),
            severity=dead.severity,
            evidence={"dead share": share, "layers": len(dead.names)},
            threshold=f"above {self.share:.0%} and {self.growth:.0%} more than at first, error above {self.most:.0%} or a whole layer",
            causes=self.causes[1:] if early else self.causes,
            fixes=self.fixes[1:] if early else (self._rate.advice(0.1), *self.fixes),
        )

    def missing(self) -> str:
        """Is any window wide enough to judge?"""
        return "no ReLU layer was seen" if self._none else self._units.missing()

    def state_dict(self) -> dict[str, Any]:
        """The running windows and streaks."""
        return {**self._units.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._units.load_state_dict(state)
        self._rate.load_state_dict(state["rate"])

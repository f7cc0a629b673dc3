"""AC102: most units of a GELU, SiLU, ELU or SELU layer stay in its flat part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.dead_units import READS, Dead, DeadUnits, Limits
from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

FLAT = {"gelu": -3, "silu": -6, "elu": -3, "selu": -3}
LEAKY = ("leaky_relu", "prelu")


@dataclasses.dataclass
class DeadSmoothActivation(Rule):
    """
    ## What it checks
    The share of units whose input never left the flat part (below -3 for GELU, ELU and SELU, below -6 for SiLU: a slope of at most 5 %) in a window
    of several batches: a warning above ``share`` in a window of ``positions`` if that is ``growth`` more than in the first such window, an error
    above ``most`` in ``enough`` positions. LeakyReLU and PReLU cannot die: information above ``leaky`` of units that were always negative.
    ## Why it matters
    Almost no gradient passes such units: the layer has lost that part of its width.
    ## What to do
    Look for the step at which the share rose: a too large update before it is the usual cause. Restart with a lower rate or a warm-up.
    ## Known limits
    Gates and experts do not count. A window lasts at least 5 batches and 1,000 positions (batch times places). The limits are those of AC101; a
    unit in the flat part can come back, slowly.
    """

    code = "AC102"
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate"}
    causes = ("a too large update pushed the biases far below 0", "large negative biases", "unnormalised inputs", "too large initial weights")
    fixes = ("warm the learning rate up over the first steps", "start biases at 0 and normalise the inputs", "put a normalisation layer in front")

    share: float = 0.5
    growth: float = 0.2
    most: float = 0.9
    leaky: float = 0.95
    rearm: float = 0.4
    batches: int = 5
    positions: int = 1000
    enough: int = 300

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._none = False
        self._rate = LearningRate()
        limits = Limits(self.share, self.growth, self.most, self.rearm, self.batches, self.positions, self.enough)
        self._units = DeadUnits(limits)
        self._leaky = DeadUnits(dataclasses.replace(limits, share=1.0, most=self.leaky))

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers have a flat part."""
        self._facts = facts
        self._rate.begin(facts)
        sites = facts.of("activation")
        judged = {name: item for name, item in sites.items() if item.role not in ("gate", "expert")}
        self._units.choose(name for name, item in judged.items() if item.function in FLAT)
        self._leaky.choose(name for name, item in judged.items() if item.function in LEAKY)
        self._none = bool(sites) and not any(item.function in (*FLAT, *LEAKY) for item in sites.values())
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the layers whose window is wide enough by now."""
        self._rate.follow(snapshot)
        for dead in self._units.judge(snapshot):
            yield self._tell(snapshot, dead, f"below {self._edge(dead)}, where the slope is almost 0,", self._units.start)
        for dead in self._leaky.judge(snapshot):
            mild = dataclasses.replace(dead, severity=Severity.INFO)
            yield self._tell(snapshot, mild, "negative", self._leaky.start)

    def _edge(self, dead: Dead) -> int:
        site = self._facts.of("activation")[dead.names[dead.worst]]
        return FLAT[site.function]

    def _tell(self, snapshot: Snapshot, dead: Dead, where: str, start: int) -> Finding:
        share, early = float(dead.share[dead.worst]), dead.since == start
        limit = f"above {self.share:.0%} and {self.growth:.0%} more than at first, error above {self.most:.0%}"
        return self.finding(
            snapshot.step,
            f"{share:.0%} of the units were always {where} {dead.span(self.batches)} ({dead.names[dead.worst]})",
            first_step=dead.since,
            subjects=self._facts.upstream_first(dead.names),
            severity=dead.severity,
            evidence={"dead share": share, "layers": len(dead.names)},
            threshold=limit if dead.severity > Severity.INFO else f"above {self.leaky:.0%}",
            causes=self.causes[1:] if early else self.causes,
            fixes=self.fixes[1:] if early else (self._rate.advice(0.1), *self.fixes),
        )

    def missing(self) -> str:
        """Is any window wide enough to judge?"""
        if self._none:
            return "no GELU, SiLU, ELU, SELU, LeakyReLU or PReLU layer was seen"
        return self._units.missing() and self._leaky.missing()

    def state_dict(self) -> dict[str, Any]:
        """The running windows and streaks."""
        return {"units": self._units.state_dict(), "leaky": self._leaky.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._units.load_state_dict(state["units"])
        self._leaky.load_state_dict(state["leaky"])
        self._rate.load_state_dict(state["rate"])

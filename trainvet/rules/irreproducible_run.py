"""RN101: the run cannot be repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts


@dataclasses.dataclass
class IrreproducibleRun(Rule):
    """
    ## What it checks
    Whether a seed was set before the model was built. Information; the same finding says whether operations are deterministic, where that is
    known.
    ## Why it matters
    A failure that cannot be repeated can hardly be found, and a difference between two runs may be nothing but another seed.
    ## What to do
    Set one seed for all random generators at the top of the program.
    ## Known limits
    Seeds of some frameworks leave no trace: then nothing is said. Operations that are not deterministic are a choice for speed and not told of
    alone.
    """

    code = "RN101"
    severity = Severity.INFO
    causes = ("no seed was set",)
    fixes = ("set one seed at the top of the program",)

    def __post_init__(self) -> None:
        self._told = False
        self._known = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge the plan once."""
        self._known = self._known or facts.seeded is not None
        if facts.seeded is not False or self._told:
            return
        self._told = True
        loose = facts.deterministic is False
        seed = (
            "call keras.utils.set_random_seed(0) first"
            if facts.framework == "keras"
            else "call lightning.seed_everything(0) or torch.manual_seed(0) first"
        )
        yield self.finding(
            0,
            "no seed was set: the run cannot be repeated" + (", and operations need not be deterministic" if loose else ""),
            where="run",
            evidence={"seeded": 0} | ({"deterministic": 0} if loose else {}),
            threshold="a seed",
            fixes=(seed, "to repeat it to the last bit, switch deterministic operations on as well") if loose else (seed,),
        )

    def missing(self) -> str:
        """Whether a seed was set is not always known."""
        return "" if self._known else "whether a seed was set is not known"

    def state_dict(self) -> dict[str, Any]:
        """Was it told?"""
        return {"told": self._told, "known": self._known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._known = bool(state["told"]), bool(state["known"])

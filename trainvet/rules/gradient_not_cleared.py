"""GR106: gradients of the last step are still there when the next one begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule, Streak
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class GradientNotCleared(Rule):
    """
    ## What it checks
    A gradient other than 0 is left over when an accumulation cycle begins, on ``patience`` sampled steps in a row. Exact.
    ## Why it matters
    Every step then follows the sum of all gradients since the start: an ever larger step in a direction that is long out of date.
    ## What to do
    Call zero_grad() once per optimizer step, after step() or before backward().
    ## Known limits
    Information where several optimizers share the model (a GAN's generator leaves gradients in the discriminator, which clears them before its
    own turn) and under manual optimisation. Gradients that are accumulated on purpose are known where the trainer or the callback was told of
    them.
    """

    code = "GR106"
    reads: ClassVar[frozenset[str]] = frozenset({"run.stale_gradient"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("zero_grad() is never called, or only in some branch", "gradients are accumulated on purpose, and the callback was not told")
    fixes = (
        "call optimizer.zero_grad() before backward() in every step",
        "tell the callback of the accumulation, if it is meant",
    )

    patience: int = 2

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._cycles = Streak(self.patience)
        self._seen = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """How many optimizers there are."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look at every cycle whose beginning was seen."""
        for name, track in snapshot.tracks("run.stale_gradient").items():
            for step, value in zip(track.steps.tolist(), track.values.tolist(), strict=True):
                self._seen += 1
                if self._cycles.update((name,), np.array([value > 0]), step):
                    yield self._found(step, self._cycles.first(name))

    def _found(self, step: int, first: int) -> Finding:
        several = len(self._facts.optimizers) > 1 or self._facts.manual_optimization
        return self.finding(
            step,
            f"the gradients of the step before were still there when a step began, {self.patience} times in a row",
            first_step=first,
            severity=Severity.INFO if several else Severity.ERROR,
            evidence={"cycles": self._seen},
            threshold=f"no gradient left over, {self.patience} cycles",
        )

    def missing(self) -> str:
        """How many cycles were seen to begin."""
        return "" if self._seen >= self.patience else f"{self._seen} of {self.patience} cycles"

    def state_dict(self) -> dict[str, Any]:
        """The running streak."""
        return {"cycles": self._cycles.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._cycles.load_state_dict(state["cycles"])
        self._seen = int(state["seen"])

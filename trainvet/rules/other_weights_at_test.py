"""MO110: a test or prediction runs with other weights than the ones that were trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class OtherWeightsAtTest(Rule):
    """
    ## What it checks
    A fingerprint of the weights at the start of a test or prediction equals that at the end of training, or that of the checkpoint named.
    ## Why it matters
    The number that is reported belongs to another model: one that was never trained, or an old checkpoint.
    ## What to do
    Hand the trained model over, or name the checkpoint to be tested.
    ## Known limits
    Seen where one callback is there for both the training and the test. Averaged weights (EMA, SWA) differ by design and are left alone.
    """

    code = "MO110"
    reads: ClassVar[frozenset[str]] = frozenset({"run.other_weights"})
    causes = ("the model under test was built anew", "a checkpoint other than the one meant was loaded")
    fixes = ("test the model that was trained, or name the checkpoint: ckpt_path='best'",)

    def __post_init__(self) -> None:
        self._seen = 0

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Every test is judged."""
        for name, track in snapshot.tracks("run.other_weights").items():
            for step, value in zip(track.steps.tolist(), track.values.tolist(), strict=True):
                self._seen += 1
                if not value <= 0:
                    yield self.finding(
                        step,
                        "the weights under test are neither the trained ones nor those of the checkpoint named",
                        where="" if name == "run" else name,
                        evidence={"other weights": value},
                        threshold="equal fingerprints",
                    )

    def missing(self) -> str:
        """Whether there was a test."""
        return "" if self._seen else "a test or prediction after the training"

    def state_dict(self) -> dict[str, Any]:
        """How many tests there were."""
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen = int(state["seen"])

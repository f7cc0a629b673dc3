"""IN107: the same batch comes again and again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class RepeatedBatch(Rule):
    """
    ## What it checks
    A fingerprint of everything in the batch. ``repeats`` sampled steps in a row with the fingerprint of the one before are told once.
    ## Why it matters
    The model learns one batch by heart and nothing else. The usual reasons are an iterator that is made anew at every step, or a cached batch.
    ## What to do
    Take batches from one iterator over the loader; look at what the data set's `__getitem__` does with the index.
    ## Known limits
    Silent where batches are meant to repeat (`overfit_batches`) and where an epoch has a single batch. Sampled steps only: an order that stays the
    same shows one batch at every sample whose distance is a multiple of the epoch. Unless the loader is known to shuffle, the distances must
    therefore have no common divisor, as those of the first steps, which are all sampled.
    """

    code = "IN107"
    reads: ClassVar[frozenset[str]] = frozenset({"input.fingerprint"})
    causes = ("the iterator over the loader is made anew at every step", "the data set returns one sample whatever the index")
    fixes = ("keep one iterator: for batch in loader", "use the index that __getitem__ is given")

    repeats: int = 5

    def __post_init__(self) -> None:
        self._meant = ""
        self._shuffled = False
        self._last: dict[str, float] = {}
        self._at = 0
        self._apart = 0
        self._count = 0
        self._first = 0
        self._told = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Are batches meant to repeat?"""
        self._shuffled = facts.shuffled is True
        self._meant = "batches are meant to repeat" if facts.repeats_batches else "an epoch is one batch" if facts.batches_per_epoch == 1 else ""
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Compare with the sample before."""
        column = snapshot.column("input.fingerprint")
        if column is None or self._meant:
            return
        now = dict(zip(column[0], column[1].tolist(), strict=True))
        same = bool(now) and now == self._last
        self._count = self._count + 1 if same else 0
        self._apart = math.gcd(self._apart, snapshot.step - self._at) if same else 0
        self._at = snapshot.step
        self._first = self._first if same and self._count > 1 else snapshot.step
        self._told = self._told and same
        self._last = now
        if self._count < self.repeats or self._told:
            return
        if self._apart != 1 and not self._shuffled:  # any epoch that divides all distances explains it
            return
        self._told = True
        yield self.finding(
            snapshot.step,
            f"{self._count + 1} sampled steps in a row had the very same batch",
            first_step=self._first,
            subjects=tuple(now),
            evidence={"equal batches": self._count + 1},
            threshold=f"{self.repeats} repetitions in a row",
        )

    def missing(self) -> str:
        """Why it was not judged."""
        return self._meant or ("" if self._last else "a sampled batch")

    def state_dict(self) -> dict[str, Any]:
        """The last fingerprint and the streak."""
        return {
            "last": dict(self._last),
            "at": self._at,
            "apart": self._apart,
            "count": self._count,
            "first": self._first,
            "told": self._told,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._last = {str(name): float(value) for name, value in state["last"].items()}
        self._at, self._apart = int(state["at"]), int(state["apart"])
        self._count, self._first, self._told = int(state["count"]), int(state["first"]), bool(state["told"])

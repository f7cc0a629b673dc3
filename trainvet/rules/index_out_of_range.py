"""IN111: an embedding is asked for a row that it does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class IndexOutOfRange(Rule):
    """
    ## What it checks
    The smallest and largest index that an embedding is given against the number of its rows.
    ## Why it matters
    On a CPU the forward raises; on a GPU it stops with a device assertion far from the place, and some back ends silently return zeros or the
    last row.
    ## What to do
    Make the table as large as the vocabulary, count ids from 0, and map unknown tokens to a row of their own.
    ## Known limits
    Sampled steps only: a rare index may pass between two of them. An index that makes the forward raise is told with the exception.
    """

    code = "IN111"
    reads: ClassVar[frozenset[str]] = frozenset({"module.index_min", "module.index_max"})
    severity: ClassVar[Severity] = Severity.ERROR
    sees_poison = True
    fixes = ("make the table as large as the largest id plus 1", "map padding and unknown tokens to rows of their own")
    causes = ("the table is smaller than the vocabulary", "ids that count from 1, or a padding id of -1")

    def __post_init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._seen = 0
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The tables and their rows."""
        self._rows = {layer.name: layer.width_in for layer in facts.layers if layer.kind == "embedding" and layer.width_in > 0}
        for name, subject in facts.parameters.items():  # an embedding whose first call raised was never traced
            if subject.role == "embedding" and subject.shape:
                self._rows.setdefault(subject.module or name, subject.shape[0])
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Every embedding of a sampled step."""
        column = snapshot.column("module.index_max")
        if column is None:
            return
        names, high = column
        low = snapshot.values("module.index_min", names)
        for index in np.flatnonzero(np.isfinite(high) & np.isfinite(low)).tolist():
            name, rows = names[index], self._rows.get(names[index], 0)
            if not rows:
                continue
            self._seen += 1
            if (low[index] >= 0 and high[index] < rows) or name in self._told:
                continue
            self._told.add(name)
            wrong = int(high[index]) if high[index] >= rows else int(low[index])
            fix = f"make the table at least {wrong + 1} rows large (it has {rows})" if wrong >= 0 else f"map the id {wrong} to a row of its own"
            yield self.finding(
                snapshot.step,
                f"{name} has rows 0 to {rows - 1} and is asked for row {wrong}",
                subjects=(name,),
                evidence={"smallest": int(low[index]), "largest": int(high[index]), "rows": rows},
                threshold=f"0 to {rows - 1}",
                causes=self.causes if wrong >= 0 else self.causes[::-1],
                fixes=(fix, self.fixes[1] if wrong >= 0 else "count ids from 0"),
            )

    def missing(self) -> str:
        """Whether an embedding was seen."""
        return "" if self._seen else "no embedding was seen"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"seen": self._seen, "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen, self._told = int(state["seen"]), set(state["told"])

"""IN101: the batch itself holds NaN or infinite values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.origin import value_at
from trainvet.poison import WITNESSES, counts
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class NonFiniteInput(Rule):
    """
    ## What it checks
    NaN and infinite elements in the inputs and labels of a step: an error where the step's loss or gradient is not finite either. Where both stay
    finite (the values are masked) it is information, after ``patience`` samples.
    ## Why it matters
    No setting helps against a NaN that is in the data: it reaches every weight with the first update.
    ## What to do
    Find the samples; drop or fill them, and add an eps to a standard deviation that may be 0.
    ## Known limits
    Inputs are looked at on sampled steps and on a step whose loss or gradient is not finite.
    """

    code = "IN101"
    reads: ClassVar[frozenset[str]] = frozenset({*WITNESSES, "input.nan", "input.inf", "label.nan", "label.inf", "gradient.nan", "gradient.inf"})
    severity: ClassVar[Severity] = Severity.ERROR
    sees_poison = True
    causes = ("missing values in the data", "0/0 while standardising a constant column")
    fixes = ("drop the bad samples, or fill them: numpy.nan_to_num", "add an eps to the standard deviation you divide by")

    patience: int = 3

    def __post_init__(self) -> None:
        self._seen = 0
        self._masked: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Inputs and labels of the snapshot's last step."""
        if snapshot.column("input.nan") is None and snapshot.column("label.nan") is None:
            return
        self._seen += 1
        bad = {**counts(snapshot, "input.nan", "input.inf"), **counts(snapshot, "label.nan", "label.inf")}
        if not bad:
            return
        witnesses = [value_at(snapshot, key, snapshot.step) for key in WITNESSES]
        known = [value for value in witnesses if value is not None]
        harmless = bool(known) and all(abs(value) < float("inf") for value in known) and not counts(snapshot, "gradient.nan", "gradient.inf")
        level = Severity.INFO if harmless else Severity.ERROR
        for name in bad:
            self._masked[name] = self._masked.get(name, 0) + 1
        due = [name for name in bad if self._told.get(name, 0) < level and (not harmless or self._masked[name] >= self.patience)]
        if not due:
            return
        self._told |= dict.fromkeys(due, int(level))
        count = sum(bad[name] for name in due)
        after = "; loss and gradients are finite, so they seem to be masked" if harmless else ""
        yield self.finding(
            snapshot.step,
            f"{count:g} NaN or infinite values in {', '.join(due)} of batch {snapshot.batch}, epoch {snapshot.epoch}{after}",
            subjects=due,
            severity=level,
            evidence={"elements": int(count), "batch": snapshot.batch, "epoch": snapshot.epoch},
            threshold="no NaN, no Inf",
        )

    def missing(self) -> str:
        """Whether a batch was looked at."""
        return "" if self._seen else "a sampled batch with floating inputs"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"seen": self._seen, "masked": dict(self._masked), "told": dict(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen = int(state["seen"])
        self._masked = {str(name): int(count) for name, count in state["masked"].items()}
        self._told = {str(name): int(level) for name, level in state["told"].items()}

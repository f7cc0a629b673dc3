"""IN106: the validation inputs are scaled otherwise than the training inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class ShiftedValidationInput(Rule):
    """
    ## What it checks
    Mean and standard deviation of each floating input over the sampled training batches against the first batches of an evaluation: the
    means differ by more than ``shift`` standard deviations (``augmented`` where training data are augmented), or the standard deviations by more than
    a factor of ``scale``; both by more than ``errors`` standard errors, with ``samples`` samples on each side. With fewer, from ``few`` on, only a
    difference four times as large is told.
    ## Why it matters
    The model is asked about inputs it was never shown: the validation is bad and no regularisation helps.
    ## What to do
    Use the same transform, fitted on the training data, for both.
    ## Known limits
    One mean per input, not one per feature: two features that trade places are not seen. Integer inputs are not compared. A validation
    set that is meant to differ (other domain) is to be muted.
    """

    code = "IN106"
    reads: ClassVar[frozenset[str]] = frozenset(
        {"input.mean", "input.std", "input.count", "validation_input.mean", "validation_input.std", "validation_input.count"}
    )
    causes = ("the validation data miss the scaling that the training data get, or get another one",)
    fixes = ("apply the training transform, with the training data's mean and deviation, to the validation data",)

    shift: float = 0.5
    augmented: float = 1.0
    scale: float = 2.0
    errors: float = 6.0
    samples: int = 500
    few: int = 100

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._seen = PerSubject(count=0.0, mean=0.0, spread=0.0)
        self._told: set[str] = set()
        self._compared = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Dtypes, and whether training data are augmented."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Add a training batch, or compare an evaluation."""
        column = snapshot.column("input.mean")
        if column is not None:
            self._add(column[0], column[1], snapshot.values("input.std", column[0]), snapshot.values("input.count", column[0]))
        column = snapshot.column("validation_input.mean")
        if column is None:
            return
        std, count = (snapshot.values(f"validation_input.{key}", column[0]) for key in ("std", "count"))
        inputs = self._facts.of("input")
        for name, mean, deviation, there in zip(column[0], column[1].tolist(), std.tolist(), count.tolist(), strict=True):
            if name in self._told or name not in self._seen.names or (name in inputs and "int" in inputs[name].dtype):
                continue
            row = self._seen.names.index(name)
            here, centre = float(self._seen["count"][row]), float(self._seen["mean"][row])
            variance = float(self._seen["spread"][row]) / here if here > 0 else 0.0
            least = min(here, there)
            if not (least >= self.few and variance > 0 and math.isfinite(mean) and math.isfinite(deviation)):
                continue
            self._compared += 1
            own, factor = math.sqrt(variance), 1.0 if least >= self.samples else 4.0
            apart, ratio = abs(mean - centre) / own, deviation / own
            error = math.sqrt(1 / here + 1 / there)
            limit = factor * (self.augmented if self._facts.augmented else self.shift)
            log = abs(math.log(ratio)) if ratio > 0 else math.inf
            moved = apart > limit and apart > self.errors * error
            stretched = log > factor * math.log(self.scale) and log > self.errors * error / math.sqrt(2)
            if moved or stretched:
                self._told.add(name)
                yield self.finding(
                    snapshot.step,
                    f"{name} is {centre:.3g} ± {own:.3g} in training and {mean:.3g} ± {deviation:.3g} in validation",
                    subjects=(name,),
                    evidence={"shift": apart, "ratio of deviations": ratio, "training samples": int(here), "validation samples": int(there)},
                    threshold=f"a shift of {limit:g} standard deviations, a factor of {self.scale**factor:g}",
                )

    def _add(self, names: tuple[str, ...], mean: Any, std: Any, count: Any) -> None:
        """Means and spreads of two parts put together (Chan, Golub and LeVeque)."""
        rows = self._seen.rows(names)
        good = np.isfinite(mean) & np.isfinite(std) & (count > 0)
        before, centre, spread = (self._seen[key][rows] for key in ("count", "mean", "spread"))
        with np.errstate(all="ignore"):
            total = before + count
            apart = mean - centre
            self._seen["spread"][rows] = np.where(good, spread + std**2 * count + apart**2 * before * count / total, spread)
            self._seen["mean"][rows] = np.where(good, centre + apart * count / total, centre)
            self._seen["count"][rows] = np.where(good, total, before)

    def missing(self) -> str:
        """Whether both sides were seen."""
        return "" if self._compared else f"a floating input seen {self.few} times in training and in an evaluation"

    def state_dict(self) -> dict[str, Any]:
        """Sums of the training inputs."""
        return {"seen": self._seen.state_dict(), "told": sorted(self._told), "compared": self._compared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen.load_state_dict(state["seen"])
        self._told, self._compared = set(state["told"]), int(state["compared"])

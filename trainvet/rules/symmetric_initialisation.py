"""WT107: units that start equal and stay equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Subject

SPREAD = 1e-6  # relative to the largest element: what rounding may add to a constant
VARIED = 0.05  # of |mean|: how far the first update, of different length for each element (dropout), may take the elements of a constant apart


@dataclasses.dataclass
class SymmetricInitialisation(Rule):
    """
    ## What it checks
    After the first step more than ``share`` of the matrices are constant (their standard deviation at most 5 % of their mean's size: weights are
    seen after an update) or have equal rows; or, on ``patience`` samples in a row, a matrix has equal rows and its
    gradient has equal rows too (and is not zero). A row holds the weights of one unit.
    ## Why it matters
    Units with equal weights and equal gradients stay equal for ever: a layer of any width then does the work of one unit.
    ## What to do
    Initialise the named matrix at random; only biases may start equal.
    ## Known limits
    Constant matrices whose units dropout has parted by more than 5 % in one step are not seen; nor is a mean counted that the first update may have
    made. Single zero-initialised matrices (residual branches, LoRA's B, output heads) are no matter: their gradients differ by row. Embeddings,
    normalisation scales and matrices with one row do not count. Silent when the weights were loaded or the run was resumed.
    """

    code = "WT107"
    severity = Severity.ERROR
    reads: ClassVar[frozenset[str]] = frozenset(
        {"weight.min", "weight.max", "weight.mean", "weight.std", "weight.identical_rows", "gradient.identical_rows", "update.rms"}
    )
    causes = ("zero or constant initialisation", "a forgotten reset_parameters or initialiser", "weights filled in place with one value")
    fixes = ("initialise the matrix at random (He or Glorot)", "call the layer's own reset_parameters, or drop the custom initialisation")

    share: float = 0.6
    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices: dict[str, Subject] = {}
        self._rows = Rows()
        self._frozen = 0
        self._streak = Streak(self.patience)
        self._told: set[str] = set()
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which tensors are matrices of units."""
        self._facts = facts
        matrices = {name: item for name, item in facts.parameters.items() if sum(size > 1 for size in item.shape) >= 2}
        matrices = {name: item for name, item in matrices.items() if item.shape[self._unit_axis()] > 1 and item.role not in ("embedding", "norm")}
        self._matrices = {name: item for name, item in matrices.items() if item.trainable}
        self._frozen = len(matrices) - len(self._matrices)
        self._rows.choose(self._matrices)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the matrices after the first step, then each one over several samples."""
        column = snapshot.column("weight.identical_rows")
        if column is None or not self._rows.find(column[0]) or self._facts.resumed or self._facts.pretrained:
            return
        self._samples += 1
        names, rows = self._rows.names, self._rows.values(snapshot, "weight.identical_rows")
        if self._samples > 1 and not rows.any() and not self._streak.longest():
            return
        low, high, gradient = (self._rows.values(snapshot, key) for key in ("weight.min", "weight.max", "gradient.identical_rows"))
        constant = (high - low <= SPREAD * np.maximum(np.abs(low), np.abs(high))) | (rows == 1) | self._level(snapshot)
        if self._samples == 1 and snapshot.applied <= 1 and len(names) >= 2 and constant.sum() > self.share * (len(names) + self._frozen):
            equal = [name for name, same in zip(names, constant, strict=True) if same]
            yield self._tell(
                snapshot.step, equal, snapshot.step, f"{len(equal)} of {len(names) + self._frozen} matrices are constant or have equal rows"
            )
        due = [names[index] for index in self._streak.update(names, (rows == 1) & (gradient == 1), snapshot.step)]
        fresh = [name for name in due if name not in self._told]
        if fresh:
            what = "all rows are equal and receive equal gradients, so that they stay equal"
            yield self._tell(snapshot.step, fresh, min(self._streak.first(name) for name in fresh), what)

    def _level(self, snapshot: Snapshot) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [S]: nearly constant around a mean that is not the first update's work. A random initialisation has a mean near 0."""
        mean, std, moved = (self._rows.values(snapshot, key) for key in ("weight.mean", "weight.std", "update.rms"))
        size = np.abs(mean)
        level: np.ndarray[Any, np.dtype[np.bool_]] = (std <= VARIED * size) & (size > 0) & ~(size < 2 * moved)
        return level

    def _tell(self, step: int, names: list[str], since: int, what: str) -> Finding:
        self._told.update(names)
        subjects = self._facts.upstream_first(names)
        return self.finding(
            step,
            what,
            first_step=since,
            subjects=subjects,
            evidence={"matrices": len(names), "of": len(self._matrices) + self._frozen},
            threshold=f"at most {self.share:.0%} of the matrices, none with equal gradients",
            fixes=(self._expected(self._matrices[subjects[0]]), self.fixes[1]),
        )

    def _expected(self, subject: Subject) -> str:
        units = subject.shape[self._unit_axis()]
        inputs = subject.numel // units
        if any(kind in subject.module_type.lower() for kind in ("lstm", "gru", "rnn")):
            return f"initialise {subject.name} orthogonally (recurrent) or with Glorot (Xavier), a std near {math.sqrt(2 / (inputs + units)):.2g}"
        he, glorot = math.sqrt(2 / inputs), math.sqrt(2 / (inputs + units))
        return f"initialise {subject.name} with He (Kaiming), a std of {he:.2g}, in front of a ReLU, else with Glorot (Xavier), {glorot:.2g}"

    def _unit_axis(self) -> int:
        return -1 if "keras" in self._facts.framework else 0

    def missing(self) -> str:
        """Was the start of fresh weights seen?"""
        if self._facts.resumed or self._facts.pretrained:
            return "not judged: the weights were loaded"
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"streak": self._streak.state_dict(), "told": sorted(self._told), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state["streak"])
        self._told, self._samples = set(state["told"]), int(state["samples"])

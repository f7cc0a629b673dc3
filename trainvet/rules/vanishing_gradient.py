"""GR102: gradients too small for the optimizer to use, or fading towards the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rolling import Rollings
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Optimizer, Snapshot, Vector


@dataclasses.dataclass
class VanishingGradient(Rule):
    """
    ## What it checks
    On ``patience`` samples in a row after step 10, for each optimizer. Rounding (SGD): learning rate/(1-momentum) · RMS(gradient)/RMS(weight) of a
    matrix below ``ulp``, at 10 % of the peak rate at least. Epsilon (Adam): RMS(gradient) below 10 ε in more than ``share`` of the matrices. Depth:
    the largest RMS in the first quarter of at least 4 matrices below ``fading`` of the median in the last. Error where half of them are concerned.
    ## Why it matters
    The layers nearest the input stay as they were initialised, whatever the loss does.
    ## What to do
    ReLU or GELU in place of sigmoid or tanh, with their initialisation; residual paths or normalisation; for tiny gradients a smaller ε.
    ## Known limits
    Absolute limits say little, hence these relative ones (smallest healthy ratio over depth: 0.024). Queries and keys have tiny gradients while
    attention is uniform: where something in their place receives more, nothing vanishes. Embeddings and gradients of exactly 0 (GR104) do
    not count, nor gradients that have faded evenly over all matrices from a healthy start, nor a loss below 1 % of its start: that is convergence.
    """

    code = "GR102"
    reads: ClassVar[frozenset[str]] = frozenset(
        {"gradient.rms", "gradient.abs_max", "gradient.present", "weight.rms", "optimizer.learning_rate", "loss.value"}
    )
    causes = (
        "sigmoid or tanh layers in a stack",
        "weights initialised too small",
        "no residual path or normalisation",
        "a loss multiplied by a tiny factor",
    )
    fixes = ("use ReLU or GELU with He or Glorot initialisation", "add residual paths or normalisation layers")

    ulp: float = 6e-8
    epsilons: float = 10.0
    share: float = 0.25
    fading: float = 1e-3
    patience: int = 5
    after: int = 10

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rate = LearningRate()
        self._loss = Rollings(10, start=0.0)
        self._early = PerSubject(rms=-1.0)
        self._streak = Streak(self.patience)
        self._parts: list[tuple[Optimizer, Rows]] = []
        self._depth: dict[str, tuple[tuple[str, ...], Any]] = {}
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices each optimizer holds."""
        self._facts = facts
        self._rate.begin(facts)
        self._parts, self._depth = [], {}
        for optimizer in facts.optimizers:
            rows, plan = Rows(), facts.parameters
            held = (plan[name] for name in optimizer.parameters if name in plan)
            rows.choose(item.name for item in held if item.is_matrix and not item.tied_to and item.role != "embedding")
            self._parts.append((optimizer, rows))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample; those of the first 10 applied steps tell what the gradients were like at the start."""
        self._rate.follow(snapshot)
        for _, rows, fresh in self._loss.add(snapshot, "loss.value"):
            if rows.count - fresh < 10 <= rows.count:
                rows.kept["start"] = median(rows.values[:10])
        column = snapshot.column("gradient.rms")
        for optimizer, chosen in self._parts if column is not None else ():
            if column is not None and chosen.find(column[0]):
                yield from self._judge(snapshot, optimizer, chosen)

    def _judge(self, snapshot: Snapshot, optimizer: Optimizer, chosen: Rows) -> Iterable[Finding]:
        names, rms = chosen.names, chosen.values(snapshot, "gradient.rms")
        own = self._early.rows(names)
        fresh = (self._early["rms"][own] < 0) | (snapshot.applied <= self.after)
        self._early["rms"][own] = np.where(fresh, np.fmax(self._early["rms"][own], rms), self._early["rms"][own])
        if snapshot.applied <= self.after:
            return
        self._samples += 1
        alive = (rms >= 0) & ~(chosen.values(snapshot, "gradient.abs_max") == 0) & ~(chosen.values(snapshot, "gradient.present") == 0)
        early = np.full(len(names), np.inf) if self._facts.resumed else self._early["rms"][own]
        rate = self._rate.of(names) / max(1 - optimizer.momentum, 1e-3)
        weight, settled = chosen.values(snapshot, "weight.rms"), self._rate.settled(names, 0.1)
        with np.errstate(divide="ignore", invalid="ignore"):
            rounding = np.where(settled & (weight > 0), self.ulp * weight / rate, 0.0)
        sgd, adam = optimizer.family == "sgd", optimizer.family == "adam"
        tiny = _tiny(rms, rounding, early, self.fading, alive) & sgd
        under = _tiny(rms, np.full(len(names), self.epsilons * optimizer.epsilon), early, self.fading, alive) & adam
        faded, first, last = self._faded(names, rms, alive)
        found = (tiny, under, faded)
        holds = np.array([tiny.any(), under.sum() > self.share * alive.sum(), faded.any()]) & (not self._converged())
        kinds = tuple(f"{optimizer.name} {kind}" for kind in ("rounding", "epsilon", "depth"))
        due = self._streak.update(kinds, holds, snapshot.step, clear=~holds & np.array([True, not under.any(), not first < 2 * self.fading * last]))
        if not due:
            return
        concerned = np.logical_or.reduce([found[place] for place in due])
        lines = (
            f"learning rate times gradient is lost in rounding in {int(tiny.sum())} of {len(names)} matrices",
            f"the gradient is below {self.epsilons:g} times Adam's epsilon in {int(under.sum())} of {len(names)} matrices",
            f"the gradient fades from {last:.1g} in the last matrices to {first:.1g} in the first",
        )
        smallest = float(rms[concerned].min())
        epsilon = (f"set Adam's epsilon to about {smallest / 10:.0e} (now {optimizer.epsilon:g})",) if adam and 1 in due else ()
        yield self.finding(
            snapshot.step,
            "; ".join(lines[place] for place in due),
            first_step=min(self._streak.first(kinds[place]) for place in due),
            subjects=self._facts.upstream_first(name for name, one in zip(names, concerned, strict=True) if one),
            severity=Severity.ERROR if 2 * concerned.sum() >= len(names) else Severity.WARNING,
            evidence={"smallest": smallest, "largest": float(rms[alive].max()), "matrices": int(concerned.sum())},
            threshold=(f"{self.ulp:g} of the weight", f"{self.epsilons:g} times epsilon", f"{self.fading:g} of the last quarter")[due[0]],
            fixes=(*epsilon, *self.fixes),
        )

    def _faded(self, names: tuple[str, ...], rms: Vector, alive: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], float, float]:
        """Matrices far below the last quarter where all of the first quarter are; the largest of those, the median of that; 0 where unknown."""
        if self._depth.get(names[0], ((), None))[0] is not names:
            self._depth[names[0]] = names, np.array([self._facts.parameters[name].depth for name in names])
        depth = self._depth[names[0]][1]
        order = np.argsort(depth, kind="stable")
        order = order[(alive & (depth >= 0))[order]]
        quarter = len(order) // 4
        if not quarter:
            return np.zeros(len(names), dtype=bool), 0.0, 0.0
        first, last = float(rms[order[:quarter]].max()), median(rms[order[-quarter:]])
        return alive & (rms < self.fading * last) & (first < self.fading * last), first, last

    def _converged(self) -> bool:
        now = [(rows.kept["start"], median(rows.values[-10:])) for rows in self._loss.all() if rows.count >= 10]
        return bool(now) and all(0 < level < 0.01 * start for start, level in now)

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples after step {self.after}"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks and the gradients at the start."""
        state = {"early": self._early.state_dict(), "streak": self._streak.state_dict(), "loss": self._loss.state_dict()}
        return {**state, "rate": self._rate.state_dict(), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._early.load_state_dict(state["early"])
        self._streak.load_state_dict(state["streak"])
        self._loss.load_state_dict(state["loss"])
        self._rate.load_state_dict(state["rate"])
        self._samples = int(state["samples"])


def _tiny(rms: Vector, limit: Vector, early: Vector, fading: float, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Below the limit, and small from the start or far below the other matrices: where all fade evenly from a healthy start, the run converges."""
    largest = float(rms[alive].max()) if alive.any() else 0.0
    return alive & (rms < limit) & ((early < 100 * limit) | (rms < fading * largest))

"""GR102: gradients too small for the optimizer to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector


@dataclasses.dataclass
class VanishingGradient(Rule):
    """
    ## What it checks
    On ``patience`` samples in a row, from step ``after`` on, over matrices with a gradient that is not exactly zero. SGD: lr/(1-momentum)·RMS(g)/RMS(w)
    below ``ulp`` (half a unit in the last place of float32). Adam and its kin: RMS(g) below ``epsilons`` times epsilon in more than ``share`` of
    the matrices. Any optimizer: the median RMS(g) of the first quarter of the matrices below ``decay`` times that of the last quarter. Error where
    half of the matrices or more are concerned.
    ## Why it matters
    The layers near the input stand still while those near the output learn: the curve falls a little and then rests.
    ## What to do
    ReLU or GELU in place of sigmoid and tanh stacks, He or Glorot initialisation, residual connections, normalisation; with Adam a smaller epsilon.
    ## Known limits
    Silent once the loss is below 1 % of its start (a fitted model has no gradient), while the rate rises or is below 10 % of its peak (SGD), for
    embeddings, and with fewer than 4 matrices (decay). Gradients of exactly zero are GR104's. Smallest healthy decay measured: 0.024.
    """

    code = "GR102"
    reads: ClassVar[frozenset[str]] = frozenset({"gradient.rms", "weight.rms", "optimizer.learning_rate", "loss.value"})
    causes = ("a deep stack of sigmoid or tanh layers", "initial weights too small", "a layer in between that is dead or saturated")
    fixes = ("use ReLU or GELU with He initialisation, or add residual connections or normalisation between the layers",)

    ulp: float = 6e-8
    epsilons: float = 10.0
    share: float = 0.25
    decay: float = 1e-3
    patience: int = 5
    after: int = 10
    converged: float = 0.01

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows, self._rate, self._streak = Rows(), LearningRate(), Streak(self.patience)
        self._family: dict[str, tuple[str, float, float]] = {}
        self._start: list[float] = []
        self._loss = np.nan
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices count, in forward order, and what their optimizer can use."""
        self._facts = facts
        self._rate.begin(facts)
        self._family = {name: (o.family, o.epsilon, o.momentum) for o in facts.optimizers for name in o.parameters}
        matrices = [name for name, subject in facts.parameters.items() if subject.is_matrix and subject.role != "embedding" and name in self._family]
        self._rows.choose(matrices)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample; series only move the loss and the rate."""
        self._rate.follow(snapshot)
        for track in snapshot.tracks("loss.value").values():
            self._start += track.values[: max(0, 10 - len(self._start))].tolist()
            self._loss = float(np.median(track.values[-20:]))
        column = snapshot.column("gradient.rms")
        if column is None or snapshot.step < self.after or not self._rows.find(column[0]) or self._fitted():
            return
        names, gradient = self._rows.names, self._rows.values(snapshot, "gradient.rms")
        weight = self._rows.values(snapshot, "weight.rms")
        alive = gradient > 0
        if not alive.any():
            return
        self._samples += 1
        yield from self._below_ulp(snapshot.step, names, gradient, weight, alive)
        yield from self._below_epsilon(snapshot.step, names, gradient, alive)
        yield from self._decaying(snapshot.step, names, gradient, alive)

    def _below_ulp(self, step: int, names: tuple[str, ...], gradient: Vector, weight: Vector, alive: Any) -> Iterable[Finding]:
        rate = self._rate.of(names)
        momentum = np.array([self._family[name][2] if self._family[name][0] == "sgd" else np.nan for name in names])
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = rate / (1 - momentum) * gradient / weight
        still = alive & (moved < self.ulp) & self._rate.settled(names, 0.1)
        due = self._streak.update(names, still, step)
        if due:
            smallest = float(np.min(moved[due]))
            what = f"steps of SGD move these weights by less than float32 can hold ({smallest:.1g} of their size)"
            yield self._tell(step, what, [names[row] for row in due], still, {"step over weight": smallest}, f"{self.ulp:g}", [])

    def _below_epsilon(self, step: int, names: tuple[str, ...], gradient: Vector, alive: Any) -> Iterable[Finding]:
        epsilon = np.array([self._family[name][1] if self._family[name][0] == "adam" else 0.0 for name in names])
        small = alive & (gradient < self.epsilons * epsilon)
        held = bool(small.sum() > self.share * max(1, int((epsilon > 0).sum())))
        if self._streak.update(("epsilon",), np.array([held]), step):
            chosen = [name for name, flag in zip(names, small, strict=True) if flag]
            size = median(gradient[small])
            what = f"gradients of about {size:.1g} vanish beside Adam's epsilon of {float(epsilon[small].max()):g}"
            fix = [f"lower epsilon to {size / 100:.0e}"]
            yield self._tell(step, what, chosen, small, {"gradient rms": size, "epsilon": float(epsilon.max())}, f"{self.epsilons:g} epsilon", fix)

    def _decaying(self, step: int, names: tuple[str, ...], gradient: Vector, alive: Any) -> Iterable[Finding]:
        parameters = self._facts.parameters
        known = [row for row in np.flatnonzero(alive) if parameters[names[row]].depth >= 0]
        held, ratio, first = False, np.nan, []
        if len(known) >= 4:
            known.sort(key=lambda row: parameters[names[row]].depth)
            quarter = max(1, len(known) // 4)
            first = known[:quarter]
            ratio = median(gradient[first]) / median(gradient[known[-quarter:]])
            held = bool(ratio < self.decay)
        if self._streak.update(("decay",), np.array([held]), step):
            small = gradient < self.decay * median(gradient[known[-quarter:]])
            what = f"the gradient shrinks to {ratio:.1g} of its size on the way from the last layers to the first"
            chosen = [names[row] for row in known if small[row]]
            yield self._tell(step, what, chosen, small & alive, {"first over last quarter": ratio}, f"{self.decay:g}", [])

    def _tell(self, step: int, what: str, chosen: list[str], small: Any, evidence: dict[str, Any], limit: str, fixes: list[str]) -> Finding:
        first = min((self._streak.first(name) for name in (*chosen, "epsilon", "decay") if self._streak.first(name) >= 0), default=step)
        severity = Severity.ERROR if small.sum() >= 0.5 * len(small) else Severity.WARNING
        evidence |= {"matrices": int(small.sum()), "of": len(small)}
        subjects = self._facts.upstream_first(chosen)
        return self.finding(
            step,
            what,
            first_step=min(first, step),
            subjects=subjects,
            severity=severity,
            evidence=evidence,
            threshold=limit,
            fixes=(*fixes, *self.fixes),
        )

    def _fitted(self) -> bool:
        return len(self._start) >= 10 and bool(abs(self._loss) < self.converged * abs(float(np.median(self._start))))

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples after step {self.after}"

    def state_dict(self) -> dict[str, Any]:
        """Streaks, rates and the loss."""
        state = {"streak": self._streak.state_dict(), "rate": self._rate.state_dict(), "start": list(self._start)}
        return {**state, "loss": str(self._loss), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state["streak"])
        self._rate.load_state_dict(state["rate"])
        self._start, self._loss, self._samples = list(state["start"]), float(state["loss"]), int(state["samples"])

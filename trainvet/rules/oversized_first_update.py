"""WT104: the first updates replace the weights instead of changing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.matrices import READS, Matrices, median
from trainvet.poison import skipped_steps
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

AIM = 0.01  # of the weight: what a healthy run's first updates under Adam are at least (0.01 to 0.05); 1e-3 is a later step's
LATER = 3  # losses of the second look that are enough


@dataclasses.dataclass
class OversizedFirstUpdate(Rule):
    """
    ## What it checks
    The median over matrices of ‖update‖/‖weight‖ at each of the first ``steps`` applied steps. Above ``error``: an error at once. Above ``warn``: a
    warning where the loss does not follow, that is where its median over the ``steps`` steps after these is not at least ``fall`` (of its size) below
    the very first loss, or where it stops being finite. With fewer than 3 matrices the limits are ``few`` and five times it.
    ## Why it matters
    The initialisation is lost at once; units die, normalisation statistics jump, and the run often never recovers.
    ## What to do
    Healthy first steps are about 0.01 of the weight. Lower the rate accordingly, or warm it up: Adam's have full length whatever the gradient.
    ## Known limits
    Matrices with an RMS below 1e-3 at any of these steps (zero-initialised heads, gates, LoRA) do not count. Wide layers have small weights, so that
    Adam moves them far and they learn all the same: hence the second look at the loss. Where no loss is seen the ratio decides alone. With several
    losses (adversaries) one that falls is enough.
    """

    code = "WT104"
    sees_poison = True
    reads: ClassVar[frozenset[str]] = READS | {"optimizer.learning_rate", "loss.value", "run.skipped"}
    causes = ("learning rate too high", "no warm-up", "unnormalised inputs make the gradients large", "weights initialised too small")
    fixes = ("lower the learning rate by the factor between the measured ratio and 0.01", "warm the learning rate up", "normalise the inputs")

    warn: float = 0.2
    error: float = 1.0
    few: float = 1.0
    fall: float = 0.1
    steps: int = 10
    floor: float = 1e-3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._matrices = Matrices()
        self._rate = LearningRate()
        self._tiny: set[str] = set()
        self._told = 0
        self._judged = False
        self._open: dict[str, Any] = {}  # a warning that waits for the loss
        self._losses: dict[str, list[float]] = {}  # the first one of each, then those of the second look
        self._closed = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which matrices count."""
        self._facts = facts
        self._matrices.begin(facts)
        self._rate.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge the early samples; a warning may be followed by one error."""
        self._rate.follow(snapshot)
        if self._closed:
            return
        yield from self._second_look(snapshot)
        if self._closed or not 1 <= snapshot.applied <= self.steps or snapshot.step in skipped_steps(snapshot):
            return
        names, ratios, before = self._matrices.ratios(snapshot)
        self._tiny.update(name for name, size in zip(names, before, strict=True) if not size >= self.floor)
        keep = np.array([name not in self._tiny for name in names], dtype=bool)
        ratios = ratios[keep]
        names = tuple(name for name, kept in zip(names, keep, strict=True) if kept)
        if not names:
            return
        self._judged = True
        middle = median(ratios)
        warn, error = (self.warn, self.error) if len(names) >= 3 else (self.few, self.few * self.error / self.warn)
        severity = Severity.ERROR if middle > error else Severity.WARNING if middle > warn else 0
        if not severity > self._told:
            return
        self._told = severity
        over = self._facts.upstream_first(name for name, ratio in zip(names, ratios, strict=True) if ratio > warn)
        self._open = {
            "message": f"applied step {snapshot.applied}{self._rate.stated(names)} moved the weights by {middle:.2g} of their size"
            f" (median over {len(names)} matrices)",
            "first_step": snapshot.step,
            "subjects": list(over),
            "evidence": {"update ratio": middle, "largest": float(ratios.max()), "matrices": len(names)},
            "threshold": f"{warn:g} where the loss does not fall, error above {error:g}",
            "fixes": [self._rate.advice(AIM / middle, names), self._rate.warm_up(), self.fixes[2]],
        }
        if severity is Severity.ERROR:
            self._closed = True
            yield self._tell(snapshot.step, Severity.ERROR, "")

    def _second_look(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Collect the losses of applied steps; judge what is open after twice the steps, at 3 later losses or more."""
        rows = sorted(
            (int(step), int(applied), name, float(value))
            for name, track in snapshot.tracks("loss.value").items()
            for step, applied, value in zip(track.steps, track.applied, track.values, strict=True)
        )
        skipped = skipped_steps(snapshot)
        for step, applied, name, value in rows:
            if step in skipped or not applied:
                continue
            kept = self._losses.setdefault(name, [value])
            if not np.isfinite(value):
                yield from self._close(step, f", and the loss is {value:g}")
                return
            if applied > self.steps:
                kept.append(value)
            if applied >= 2 * self.steps and self._enough():
                yield from self._close(step, *self._course())
                return
        if snapshot.applied >= 2 * self.steps and not self._losses:
            yield from self._close(snapshot.step, "")

    def _enough(self) -> bool:
        return bool(self._losses) and all(len(losses) > LATER for losses in self._losses.values())

    def _course(self) -> tuple[str, bool]:
        """What became of the loss, in words, and whether one fell."""
        ends = [(losses[0], median(np.array(losses[1:]))) for losses in self._losses.values()]
        fell = any(first - now >= self.fall * abs(first) for first, now in ends)
        return f", and the loss went from {ends[0][0]:.3g} to {ends[0][1]:.3g}", fell

    def end(self, step: int) -> Iterable[Finding]:
        """A run that is over before the second look is judged by the losses there are."""
        if not self._closed and self._enough():
            yield from self._close(step, *self._course())

    def _close(self, step: int, outcome: str, fell: bool = False) -> Iterable[Finding]:
        self._closed = True
        if self._open and not fell:
            yield self._tell(step, Severity.WARNING, outcome)

    def _tell(self, step: int, severity: Severity, outcome: str) -> Finding:
        told = {**self._open, "message": self._open["message"] + outcome}
        self._open = {}
        return self.finding(step, severity=severity, **told)

    def missing(self) -> str:
        """The rule needs one early sample."""
        return "" if self._judged else f"a sample within the first {self.steps} applied steps"

    def state_dict(self) -> dict[str, Any]:
        """What was told, which matrices were tiny, and what waits for the loss."""
        kept = {"told": int(self._told), "judged": self._judged, "tiny": sorted(self._tiny), "rate": self._rate.state_dict()}
        return {**kept, "open": dict(self._open), "losses": {name: [*losses] for name, losses in self._losses.items()}, "closed": self._closed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._judged, self._tiny = int(state["told"]), bool(state["judged"]), set(state["tiny"])
        self._open, self._closed = dict(state["open"]), bool(state["closed"])
        self._losses = {name: [*losses] for name, losses in state["losses"].items()}
        self._rate.load_state_dict(state["rate"])

"""NF101: a loss, gradient, weight or buffer that is NaN or infinite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.learning_rate import LearningRate
from trainvet.origin import at, evidence, find, not_finite, value_at
from trainvet.poison import WITNESSES, Sentinels, counts, skipped_steps
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot, Steps

CAUSES = {
    "input": "missing values in the data, or 0/0 while standardising a constant column",
    "activation": "log, division or square root of 0 or of a negative number in this module",
    "loss": "log of 0 or division by 0 in the loss, or a batch without a valid label",
    "gradient": "an operation with a finite value but an infinite slope: square root, norm or power at 0",
    "norm": "the gradients explode: unnormalised inputs or targets, no clipping",
    "weight": "the update overflowed, the optimizer divides by 0 (eps=0), or the weights were loaded or assigned like this",
    "buffer": "running statistics took in a batch that was not finite",
}
FIXES = {
    "input": "drop or fill the bad samples, add an eps to the standard deviation you divide by",
    "activation": "add an eps or a clamp in front of log, division and square root",
    "loss": "add an eps or a clamp in front of log and division, use the loss that takes logits",
    "gradient": "write sqrt(x + eps), do not take the norm of a zero vector",
    "weight": "look at how the weight is initialised, loaded or assigned, and at the optimizer's eps",
}


@dataclasses.dataclass
class NonFiniteValue(Rule):
    """
    ## What it checks
    Loss and total gradient norm at every step, gradients, weights and buffers on sampled steps: one NaN or infinite element is enough. The place
    is the most upstream one the numbers show: input, weight, activation, buffer, loss, gradient.
    ## Why it matters
    One NaN that reaches the weights ends the training, often without a word: a fused kernel may turn NaN into 0, and the loss stays finite for ever.
    ## What to do
    Look at the place named first. A NaN in the input is repaired in the data, one in an activation or a loss by an eps or a clamp.
    ## Known limits
    A gradient that the loss scaler skips is its business (LS101); a loss that is bad then is a warning, since the weights were spared. NaN in an
    input or activation that harms neither loss nor gradient is no matter, nor are infinite activations, and buffers and frozen weights that never
    were finite (masks).
    """

    code = "NF101"
    severity = Severity.ERROR
    sees_poison = True
    causes, fixes = tuple(CAUSES.values()), tuple(FIXES.values())
    reads: ClassVar[frozenset[str]] = frozenset(
        {*WITNESSES, "run.skipped", "optimizer.learning_rate", "gradient.nan", "gradient.inf", "weight.nan", "weight.inf"}
        | {"buffer.nonfinite", "input.nan", "input.inf", "label.nan", "label.inf", "activation.nan"}
    )

    apart: int = 20  # finite steps after which a new bad value is a new episode

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rate = LearningRate()
        self._sentinels = Sentinels()
        self._harmless: set[str] = set()
        self._open: dict[str, Any] = {}
        self._bad = self._good = -1

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Take over the plan."""
        self._facts = facts
        self._rate.begin(facts)
        self._sentinels.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """One finding per episode, another one where it becomes worse."""
        skipped = skipped_steps(snapshot)
        weights, buffers = self._sentinels.non_finite(snapshot)
        steps = {*not_finite(snapshot, "loss.value"), *(step for step in not_finite(snapshot, "run.gradient_norm") if self._counts(snapshot, step))}
        if self._counts(snapshot, snapshot.step) and self._tables_are_bad(snapshot):
            steps.add(snapshot.step)
        bad = {step: Severity.WARNING if step in skipped else Severity.ERROR for step in steps}
        if weights or buffers:
            bad[snapshot.step] = Severity.FATAL
        fine = self._fine(snapshot, [*bad, *skipped])
        for step, severity in sorted(bad.items()):
            self._good = max(self._good, int(np.max(fine[fine < step], initial=-1)))
            if self._good > self._bad and step - self._bad > self.apart:
                self._open = {}
            self._bad = step
            if severity > self._open.get("severity", 0):
                self._rate.follow(snapshot, until=step)
                at_end = step == snapshot.step
                yield self._tell(at(snapshot, step), step, severity, weights if at_end else (), buffers if at_end else ())
        self._good = max(self._good, int(np.max(fine, initial=-1)))
        self._rate.follow(snapshot)
        if not bad and snapshot.step not in skipped:
            self._harmless.update(counts(snapshot, "input.nan", "input.inf", "activation.nan"))

    def _tables_are_bad(self, snapshot: Snapshot) -> bool:
        """Bad gradients; NaN activations only where neither the step's loss nor its gradient is known to be finite."""
        if counts(snapshot, "gradient.nan", "gradient.inf"):
            return True
        witnesses = [value_at(snapshot, key, snapshot.step) for key in WITNESSES]
        vouched = snapshot.column("gradient.nan") is not None or any(value is not None and np.isfinite(value) for value in witnesses)
        return not vouched and bool(counts(snapshot, "activation.nan"))

    def _counts(self, snapshot: Snapshot, step: int) -> bool:
        """A bad gradient counts unless a loss scaler owns the step: then only where the update is known to have been made."""
        return not self._facts.loss_scaler or value_at(snapshot, "run.skipped", step) == 0

    def _fine(self, snapshot: Snapshot, but: list[int]) -> Steps:
        """Steps that speak for an end of the episode: finite series, or finite weights and buffers where it had reached these."""
        measured = snapshot.column("weight.nan") is not None or snapshot.column("buffer.nonfinite") is not None
        steps = [np.array([snapshot.step] if measured else [], dtype=np.int64)]
        if self._open.get("severity", 0) < Severity.FATAL:
            steps += [track.steps for key in WITNESSES for track in snapshot.tracks(key).values()]
        return np.setdiff1d(np.concatenate(steps), but)

    def _tell(self, here: Snapshot, step: int, severity: Severity, weights: tuple[str, ...], buffers: tuple[str, ...]) -> Finding:
        losses = not_finite(here, "loss.value").get(step, ())
        if not self._open:
            origin = find(here, self._facts, step, losses=losses, weights=weights, buffers=buffers, harmless=self._harmless)
            self._open = {"kind": origin.kind, "subjects": origin.subjects, "told": origin.told, "step": step}
        self._open["severity"] = int(severity)
        kind, message = self._open["kind"], self._open["told"]
        if weights and kind != "weight":
            message += f"; it has reached {len(weights)} weights"
        if severity is Severity.WARNING:
            message += f"; {'the loss scaler skipped' if self._facts.loss_scaler else 'the guard dropped'} the update, so the weights were spared"
        return self.finding(
            step,
            message,
            first_step=self._open["step"],
            subjects=self._open["subjects"],
            severity=severity,
            evidence=evidence(here, step, losses, weights, buffers),
            threshold="no NaN, no Inf",
            causes=self._causes(kind),
            fixes=self._fixes(kind, self._open["step"], bool(weights or buffers)),
        )

    def _causes(self, kind: str) -> list[str]:
        half = "16" in self._facts.precision and "bf16" not in self._facts.precision and kind in ("activation", "loss", "gradient")
        high = kind not in ("input", "buffer")
        return [CAUSES[kind], *(["float16 overflow: a value beyond 65504"] if half else []), *(["learning rate too high"] if high else [])]

    def _fixes(self, kind: str, step: int, poisoned: bool) -> list[str]:
        fixes = [FIXES[kind]] if kind in FIXES else []
        if kind not in ("input", "buffer"):
            fixes += [f"{self._rate.advice(0.1)} and clip the gradient norm to 1.0"]
        return [*fixes, *([f"resume from a checkpoint written before step {step}: later ones are not finite"] if poisoned and step > 0 else [])]

    def state_dict(self) -> dict[str, Any]:
        """The open episode, and what is known to be harmless."""
        kept = {"open": {key: list(value) if key == "subjects" else value for key, value in self._open.items()}, "bad": self._bad, "good": self._good}
        return {**kept, "harmless": sorted(self._harmless), "sentinels": self._sentinels.state_dict(), "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._open, self._bad, self._good = dict(state["open"]), int(state["bad"]), int(state["good"])
        self._harmless = set(state["harmless"])
        self._sentinels.load_state_dict(state["sentinels"])
        self._rate.load_state_dict(state["rate"])

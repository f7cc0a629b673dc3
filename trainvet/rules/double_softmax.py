"""LO109: the loss function is given probabilities where it wants logits, or the other way round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule, Streak
from trainvet.statistics import Facts, Loss, Snapshot

CLOSE = 1e-3


@dataclasses.dataclass
class DoubleSoftmax(Rule):
    """
    ## What it checks
    On ``patience`` sampled batches in a row, what the loss function is given: every row lies in [0, 1] and sums to 1 where it wants logits or
    log-probabilities; a sigmoid where it wants logits; values outside [0, 1], or a layer without activation, where it wants probabilities;
    positive values where it wants log-probabilities.
    ## Why it matters
    A softmax of a softmax can never be sure: with 10 classes its loss stays above 1.46, and its gradient is small. It trains, slowly and badly,
    and no curve shows why. Logits taken for probabilities are clipped or make the loss meaningless.
    ## What to do
    Apply softmax or sigmoid exactly once: in the model or in the loss.
    ## Known limits
    Judged only where it is known what the loss expects; squared errors never are. Log-probabilities handed to a loss that wants logits are
    harmless.
    """

    code = "LO109"
    reads: ClassVar[frozenset[str]] = frozenset({"output.simplex_share", "output.log_simplex_share", "output.units", "output.min", "output.max"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("softmax or sigmoid is applied in the model and again in the loss", "the loss is told that it gets probabilities and is given logits")
    fixes = ("apply softmax or sigmoid once: in the model or in the loss",)

    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._batches = Streak(self.patience)
        self._seen = 0
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What each loss expects; it becomes known during the first steps."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look at one batch of every loss."""
        table = snapshot.tables.get("output")
        losses = [loss for loss in self._judged() if table is not None and loss.output in table.names]
        if table is None or not losses:
            return
        self._seen += 1
        faults = []
        for loss in losses:
            row = table.names.index(loss.output)
            faults.append(fault(loss, {key: float(column[row]) for key, column in table.columns.items()}))
        names = tuple(f"{loss.name}/{loss.output}" for loss in losses)
        for place in self._batches.update(names, np.array([bool(item) for item in faults]), snapshot.step):
            if names[place] not in self._told:
                self._told.add(names[place])
                yield self._found(snapshot, losses[place], faults[place], self._batches.first(names[place]))

    def _judged(self) -> list[Loss]:
        return [loss for loss in self._facts.losses if loss.kind != "regression" and loss.expects in ("logits", "log_probabilities", "probabilities")]

    def _found(self, snapshot: Snapshot, loss: Loss, what: str, first: int) -> Finding:
        keras, function = self._facts.framework == "keras", loss.function or "the loss"
        layer = loss.output_layer or ("the last layer" if keras else "the model")
        made = loss.output_function if loss.output_function not in ("", "linear") else "softmax"
        activation = "sigmoid" if loss.kind == "binary_cross_entropy" else "softmax"
        right = {
            "logits": f"remove {made} from {layer}: {function} applies its own",
            "log_probabilities": f"replace the softmax of {layer} by log_softmax, or hand the logits to cross_entropy",
            "raw": f"apply log_softmax to the output of {layer}, or use cross_entropy in place of {function}",
            "probabilities": f"add a {activation} to {layer}, or use the loss that takes logits",
        }
        if keras:
            right["logits"] = f"remove the activation {made} from {layer}, or build the loss with from_logits=False"
            right["probabilities"] = f"build the loss with from_logits=True, or give {layer} activation={activation!r}"
        told = {
            "logits": f"{function} wants logits and is given probabilities: {made} is applied twice",
            "log_probabilities": f"{function} wants log-probabilities and is given probabilities",
            "raw": f"{function} wants log-probabilities and is given values above 0",
            "probabilities": f"{function} wants probabilities and is given logits",
        }
        low, high = (float(snapshot.values(f"output.{key}", (loss.output,))[0]) for key in ("min", "max"))
        return self.finding(
            snapshot.step,
            told[what],
            first_step=first,
            where=loss.output_layer or loss.output,
            subjects=(loss.output_layer,) if loss.output_layer else (),
            evidence={"lowest": low, "highest": high, "batches": self.patience},
            threshold=f"{self.patience} batches in a row",
            causes=self.causes[::-1] if what in ("probabilities", "raw") else self.causes,
            fixes=(right[what],),
        )

    def missing(self) -> str:
        """What is not known of the losses, or how many batches there were."""
        if not self._judged():
            return "what the loss expects is not known" if not self._facts.losses else "no loss over classes whose input is known"
        return "" if self._seen >= self.patience else f"{self._seen} of {self.patience} sampled batches"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"batches": self._batches.state_dict(), "seen": self._seen, "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._batches.load_state_dict(state["batches"])
        self._seen, self._told = int(state["seen"]), set(state["told"])


def fault(loss: Loss, output: Mapping[str, float]) -> str:
    """What is wrong with one batch of predictions: "logits", "log_probabilities", "probabilities" (what was wanted), "raw", or "" for nothing."""
    low, high, units = output.get("min", np.nan), output.get("max", np.nan), output.get("units", 0.0)
    simplex = units > 1 and output.get("simplex_share", 0.0) >= 1
    inside = low >= 0 and high <= 1
    if loss.expects == "logits":
        return "logits" if simplex or (loss.output_function in ("sigmoid", "softmax") and inside and units > 0 and not _single(loss, units)) else ""
    if loss.expects == "log_probabilities":
        raw = loss.kind == "cross_entropy" and high > CLOSE and output.get("log_simplex_share", 1.0) <= 0
        return "log_probabilities" if simplex or (loss.output_function == "softmax" and inside and units > 1) else "raw" if raw else ""
    outside = low < -CLOSE or high > 1 + CLOSE
    linear = loss.output_function == "linear" and np.isfinite([low, high]).all() and not output.get("simplex_share", 0.0) > 0
    return "probabilities" if outside or linear else ""


def _single(loss: Loss, units: float) -> bool:
    """A softmax over one unit is another fault, LO110."""
    return loss.output_function == "softmax" and units < 2

"""AC105: an output is the same for every sample of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector


@dataclasses.dataclass
class ConstantOutput(Rule):
    """
    ## What it checks
    All samples of a batch give the same output on ``patience`` samples in a row, although inputs and labels differ. An error for what the loss is
    given; a warning for a layer that told samples apart before, or from which on everything up to a constant prediction is constant.
    ## Why it matters
    Such a layer passes nothing of the input on: the model predicts one value for all.
    ## What to do
    Look at the first layer named and at what enters it: dead units, saturation, an input that is overwritten or multiplied by 0.
    ## Known limits
    A layer that never saw the samples (position tables, learnt queries) is constant in good health: information. Batches of one sample and batches of
    equal inputs or equal labels give no verdict; gates and experts are not judged.
    """

    code = "AC105"
    reads: ClassVar[frozenset[str]] = frozenset({"activation.constant", "output.constant", "input.std", "label.std"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = (
        "the units in front of it are dead or saturated, so that only biases remain",
        "the input does not reach this layer: overwritten, detached from the data, or multiplied by 0",
        "one class or value fits nearly all labels",
    )
    fixes = (
        "divide the learning rate by 10 and warm it up, if the layer died during training",
        "follow one sample's values from the input to this layer",
        "normalise the inputs",
    )

    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._lively = PerSubject(seen=0.0, calm=0.0)  # a layer that flickers is one episode
        self._fine = PerSubject(calm=0.0)
        self._outputs, self._layers = Streak(self.patience), Streak(self.patience)
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers are judged."""
        self._facts = facts
        sites = facts.of("activation").items()
        self._rows.choose(name for name, item in sites if len(item.shape) > 1 and item.shape[0] > 1 and item.role not in ("gate", "expert"))
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge prediction and layers, unless the batch itself is constant."""
        for key in ("input.std", "label.std"):
            column = snapshot.column(key)
            if column is not None and len(column[1]) and bool((column[1] == 0).all()):
                return
        outputs = snapshot.column("output.constant")
        flat = outputs is not None and bool((outputs[1] == 1).any())
        layers = snapshot.column("activation.constant")
        self._samples += outputs is not None or layers is not None
        if outputs is not None:
            calm = _calm(self._fine, outputs[0], outputs[1] == 1)
            due = self._outputs.update(outputs[0], outputs[1] == 1, snapshot.step, clear=calm >= self.patience)
            if due:
                guilty = self._trailing(snapshot)
                names = [outputs[0][row] for row in due]
                place = f"{guilty[0]} and all behind it give" if guilty else "the model predicts"
                first = min(self._outputs.first(name) for name in names)
                yield self._tell(snapshot, f"{place} the same for every sample of the batch", [*guilty[:1], *names], None, first)
        if layers is not None and self._rows.find(layers[0]):
            yield from self._judge(snapshot, flat)

    def _judge(self, snapshot: Snapshot, flat: bool) -> Iterable[Finding]:
        names, constant = self._rows.names, self._rows.values(snapshot, "activation.constant")
        rows = self._lively.rows(names)
        self._lively["seen"][rows] = np.maximum(self._lively["seen"][rows], constant == 0)
        lively = self._lively["seen"][rows] > 0
        calm = _calm(self._lively, names, constant == 1)
        due = self._layers.update(names, constant == 1, snapshot.step, clear=calm >= self.patience)
        guilty = frozenset(self._trailing(snapshot)) if due and flat else frozenset()
        serious = {names[row] for row in due if lively[row] or names[row] in guilty}
        for severity in (Severity.WARNING, Severity.INFO) if due else ():
            chosen = self._facts.upstream_first(names[row] for row in due if (names[row] in serious) == (severity is Severity.WARNING))
            if chosen:
                more = f" and {len(chosen) - 1} more" if len(chosen) > 1 else ""
                first = min(self._layers.first(name) for name in chosen)
                yield self._tell(snapshot, f"{chosen[0]}{more} gives the same for every sample of the batch", chosen, severity, first)

    def _trailing(self, snapshot: Snapshot) -> tuple[str, ...]:
        """The layers, upstream first, from which on all are constant."""
        column = snapshot.column("activation.constant")
        if column is None or not self._rows.find(column[0]):
            return ()
        constant = dict(zip(self._rows.names, (self._rows.values(snapshot, "activation.constant") == 1).tolist(), strict=True))
        found: list[str] = []
        for name in reversed(self._facts.upstream_first(self._rows.names)):
            if not constant[name]:
                break
            found.append(name)
        return tuple(reversed(found))

    def _tell(self, snapshot: Snapshot, message: str, names: Iterable[str], severity: Severity | None, first: int) -> Finding:
        died = any(self._lively["seen"][self._lively.names.index(name)] for name in names if name in self._lively.names)
        kept = tuple(names)
        return self.finding(
            snapshot.step,
            f"{message} on {self.patience} samples in a row",
            first_step=first,
            subjects=kept,
            severity=severity,
            evidence={"outputs": len(kept)},
            threshold=f"samples of a batch that differ within {self.patience} samples",
            causes=self.causes if died else (self.causes[1], self.causes[0]),
            fixes=self.fixes if died else (self.fixes[1], self.fixes[2]),
        )

    def missing(self) -> str:
        """How many samples there were."""
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples with inputs and labels that differ"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks, and which layers told samples apart before."""
        kept = {"outputs": self._outputs.state_dict(), "layers": self._layers.state_dict(), "samples": self._samples}
        return {**kept, "lively": self._lively.state_dict(), "apart": self._fine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._outputs.load_state_dict(state["outputs"])
        self._layers.load_state_dict(state["layers"])
        self._lively.load_state_dict(state["lively"])
        self._fine.load_state_dict(state["apart"])
        self._samples = int(state["samples"])


def _calm(kept: PerSubject, names: tuple[str, ...], holds: np.ndarray[Any, np.dtype[np.bool_]]) -> Vector:
    """float64 [S]: how many samples in a row each subject has been fine, this one included."""
    rows = kept.rows(names)
    kept["calm"][rows] = calm = np.where(holds, 0.0, kept["calm"][rows] + 1)
    return calm

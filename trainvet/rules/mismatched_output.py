"""LO110: what the last layer can produce does not fit the loss or the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.prediction import faults
from trainvet.rule import Rule, Streak
from trainvet.statistics import Facts, Loss, Snapshot


@dataclasses.dataclass
class MismatchedOutput(Rule):
    """
    ## What it checks
    On ``patience`` sampled batches in a row with ``labels`` labels together: one output unit under a softmax (or a cross-entropy over classes),
    which is constant; a softmax, also one inside the model, over the batch; a ReLU in front of a binary loss that wants logits; regression targets
    outside the range of the last activation, their mean within 1.25 standard deviations of its end and the furthest one half a deviation beyond
    it. A ReLU at the end that gives nothing but 0 for ``dead`` samples. Information: a summed loss.
    ## Why it matters
    What cannot be produced cannot be learnt, whatever the rate; a constant output has no gradient at all.
    ## What to do
    Regression: no activation at the end, or targets scaled into its range. Classes: softmax over the class axis, a sigmoid for a single unit.
    ## Known limits
    Judged only where the function that made the prediction is known. Single targets outside the range (clipped noise) are left alone. A constant
    output for other reasons is AC105's, probabilities and logits mixed up are LO109's.
    """

    code = "LO110"
    reads: ClassVar[frozenset[str]] = frozenset(
        {"output.units", "output.samples", "output.simplex_share", "output.log_simplex_share", "output.column_error"}
        | {"output.max", "output.constant", "activation.batch_axis", "label.min", "label.max", "label.mean", "label.std", "label.count"}
    )
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("the last activation does not fit the targets", "targets that were scaled for another activation")
    fixes = ("choose the last activation for the targets: none, softmax over classes, or sigmoid",)

    patience: int = 3
    labels: int = 32
    dead: int = 10

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._run: dict[str, list[float]] = {}  # batches in a row, their labels, the first step
        self._told: set[str] = set()
        self._seen = 0
        self._mixed = Streak(self.patience)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What made the prediction; a summed loss is told at once."""
        self._facts = facts
        for loss in facts.losses:
            if loss.reduction == "sum" and f"{loss.name}/sum" not in self._told:
                self._told.add(f"{loss.name}/sum")
                yield self._summed(loss)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Look at one batch of every loss."""
        judged = False
        for loss in self._facts.losses:
            output, label = _row(snapshot, "output", loss.output), _row(snapshot, "label", loss.label)
            if not output:
                continue
            judged = True
            found = {what: (text, fix) for what, text, fix in faults(loss, output, label, self._facts.framework == "keras")}
            for what in ("single", "axis", "negative", "range", "dead"):
                yield from self._count(snapshot, loss, what, found.get(what), label.get("count") or output.get("samples") or 0.0)
        self._seen += judged
        yield from self._mixing(snapshot)

    def _mixing(self, snapshot: Snapshot) -> Iterator[Finding]:
        """A softmax inside the model that runs over the samples of the batch."""
        column, labels = snapshot.column("activation.batch_axis"), snapshot.column("label.count")
        if column is None or labels is None or not (labels[1] > 1).any():
            return
        due = [column[0][row] for row in self._mixed.update(column[0], column[1] > 0, snapshot.step)]
        if due:
            yield self.finding(
                snapshot.step,
                f"the softmax {due[0]} runs over the batch: each sample's weights depend on the other samples",
                first_step=min(self._mixed.first(name) for name in due),
                subjects=self._facts.upstream_first(due),
                evidence={"places": len(due)},
                threshold=f"{self.patience} sampled batches in a row",
                causes=("a wrong axis: dim=0 is the batch",),
                fixes=("apply the softmax along the last axis (dim=-1)",),
            )

    def _count(self, snapshot: Snapshot, loss: Loss, what: str, found: tuple[str, str] | None, labels: float) -> Iterator[Finding]:
        key = f"{loss.name}/{loss.output}/{what}"
        if found is None:
            self._run.pop(key, None)
            return
        run = self._run.setdefault(key, [0, 0, snapshot.step])
        run[0], run[1] = run[0] + 1, run[1] + labels
        enough = run[0] >= self.dead if what == "dead" else run[0] >= self.patience and (what != "range" or run[1] >= self.labels)
        if key in self._told or not enough:
            return
        self._told.add(key)
        yield self.finding(
            snapshot.step,
            found[0],
            first_step=int(run[2]),
            where=loss.output_layer or loss.output,
            subjects=(loss.output_layer,) if loss.output_layer else (),
            evidence={"batches": int(run[0]), "labels": int(run[1])},
            threshold=f"{self.dead if what == 'dead' else self.patience} sampled batches in a row",
            causes=("learning rate too high, or targets that the ReLU cannot reach",) if what == "dead" else None,
            fixes=(found[1],),
        )

    def _summed(self, loss: Loss) -> Finding:
        return self.finding(
            0,
            "the loss is summed over the samples: its gradient grows with the batch size",
            where=loss.name,
            severity=Severity.INFO,
            evidence={"samples": loss.samples},
            threshold="an average over the samples",
            causes=("reduction='sum'",),
            fixes=(f"use reduction='mean', or divide the learning rate by the batch size{f' ({loss.samples})' if loss.samples else ''}",),
        )

    def missing(self) -> str:
        """What is not known of the losses, or how many batches there were."""
        if not self._facts.losses:
            return "the loss is not known"
        return "" if self._seen >= self.patience else f"{self._seen} of {self.patience} sampled batches"

    def state_dict(self) -> dict[str, Any]:
        """Counts by loss and fault."""
        return {
            "run": {key: list(run) for key, run in self._run.items()},
            "told": sorted(self._told),
            "seen": self._seen,
            "mixed": self._mixed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._run = {key: list(run) for key, run in state["run"].items()}
        self._told, self._seen = set(state["told"]), int(state["seen"])
        self._mixed.load_state_dict(state["mixed"])


def _row(snapshot: Snapshot, target: str, name: str) -> dict[str, float]:
    table = snapshot.tables.get(target)
    if table is None or name not in table.names:
        return {}
    row = table.names.index(name)
    return {key: float(column[row]) for key, column in table.columns.items()}

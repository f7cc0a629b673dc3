"""IN109: regression targets of another order of magnitude than what the model puts out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Loss, Snapshot


@dataclasses.dataclass
class UnscaledTarget(Rule):
    """
    ## What it checks
    The size of regression targets (mean magnitude or standard deviation, whichever is larger) in the first ``patience`` sampled batches against the
    model's initial outputs: more than ``ratio`` times as large as these (taken as at least 1), or less than one ``ratio``-th of them.
    ## Why it matters
    The squared error and its gradient are then ratio² too large: the first updates throw the weights about, and the loss runs away or ends on a
    plateau. Targets that are far too small drown in the noise of the initial outputs.
    ## What to do
    Standardise the targets, and undo it on the predictions.
    ## Known limits
    Judged for squared error that is known to be the loss. Targets that are all 0 are not judged, nor are resumed runs.
    """

    code = "IN109"
    reads: ClassVar[frozenset[str]] = frozenset({"label.mean", "label.std", "output.abs_mean", "output.std"})
    causes = ("the targets are not standardised",)
    fixes = ("standardise the targets: subtract their mean and divide by their standard deviation, and undo it on the predictions",)

    ratio: float = 100.0
    patience: int = 2

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._outputs: dict[str, float] = {}
        self._streak: dict[str, list[int]] = {}
        self._judged: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """The losses become known with the first sampled step."""
        self._facts = facts
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """The first samples of each loss."""
        if snapshot.column("label.std") is None or self._facts.resumed:
            return
        for loss in self._facts.losses:
            if loss.kind == "regression" and loss.name not in self._judged:
                yield from self._judge(snapshot, loss)

    def _judge(self, snapshot: Snapshot, loss: Loss) -> Iterable[Finding]:
        mean, std = (float(snapshot.values(f"label.{key}", (loss.label,))[0]) for key in ("mean", "std"))
        size = max(abs(mean), std)
        output = max(float(snapshot.values(f"output.{key}", (loss.output,))[0]) for key in ("abs_mean", "std"))
        if not (math.isfinite(size) and math.isfinite(output)):
            return
        self._outputs.setdefault(loss.name, output)
        first = self._outputs[loss.name]
        large, small = size > self.ratio * max(first, 1.0), 0 < size < first / self.ratio
        streak = self._streak.setdefault(loss.name, [snapshot.step, 0])
        if not (large or small):
            self._judged.add(loss.name)
            return
        streak[1] += 1
        if streak[1] < self.patience:
            return
        self._judged.add(loss.name)
        spread = std if std > 0 else size
        yield self.finding(
            snapshot.step,
            f"targets of {mean:.3g} ± {std:.3g} where the untrained model puts out about {first:.2g}",
            first_step=streak[0],
            subjects=(loss.label,),
            evidence={"target mean": mean, "target deviation": std, "initial output": first},
            threshold=f"a factor of {self.ratio:g}",
            causes=self.causes if large else ("the targets are in a unit that makes them tiny",),
            fixes=(f"standardise the targets: subtract {mean:.3g} and divide by {spread:.3g}, and undo it on the predictions",),
        )

    def missing(self) -> str:
        """Whether a regression was judged."""
        if self._facts.losses and not any(loss.kind == "regression" for loss in self._facts.losses):
            return "no squared error is minimised"
        return "" if self._judged else "a sampled batch of a regression"

    def state_dict(self) -> dict[str, Any]:
        """The initial outputs and what was judged."""
        return {"outputs": dict(self._outputs), "streak": {name: list(item) for name, item in self._streak.items()}, "judged": sorted(self._judged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._outputs = {str(name): float(value) for name, value in state["outputs"].items()}
        self._streak = {str(name): [int(value) for value in item] for name, item in state["streak"].items()}
        self._judged = set(state["judged"])

"""FT103: validation does better than training, without a reason that is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.metrics import Metrics, direction, held_out, quantity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

PERFECT, FAR = 0.99, 0.95


@dataclasses.dataclass
class SuspiciousValidation(Rule):
    """
    ## What it checks
    A validation metric is better than the same metric of the training after it by more than ``errors`` standard errors and ``margin``, on
    ``patience`` evaluations in a row; or a validation accuracy of 0.99 at the first evaluation, where the training's is below 0.95. Information.
    ## Why it matters
    Validation data that are also in training, that are easier, or that hold one class only, make every later choice worthless.
    ## What to do
    Look for samples that are in both sets, and compare how both are made.
    ## Known limits
    Not judged with dropout or augmentation, which make training harder, nor where the layers are not known. Training metrics are means over an
    epoch in which the model gets better: hence the epoch after the evaluation is compared.
    """

    code = "FT103"
    reads: ClassVar[frozenset[str]] = frozenset({"metric.value"})
    severity: ClassVar[Severity] = Severity.INFO
    causes = (
        "samples that are in both sets",
        "validation data that are easier, or hold few classes",
        "a penalty that is part of the training loss only",
    )
    fixes = ("look for samples that are in both sets", "split the data anew, at random and by groups that belong together")

    errors: float = 3.0
    margin: float = 0.02
    patience: int = 2

    def __post_init__(self) -> None:
        self._why_not = "the layers are not known"
        self._metrics = Metrics()
        self._better: dict[str, int] = {}
        self._compared: dict[str, int] = {}
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Dropout and augmentation."""
        harder = facts.augmented or any(layer.kind == "dropout" and layer.rate > 0 for layer in facts.layers)
        self._why_not = "not judged: dropout or augmentation" if harder else "" if facts.layers else "the layers are not known"
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Compare the validation metrics with the training metrics of the epoch after."""
        for _ in self._metrics.add(snapshot):
            for name in [name for name in self._metrics.of if held_out(name) and not self._why_not]:
                same = [other for other in self._metrics.of if not held_out(other) and quantity(other) == quantity(name)]
                if same and name not in self._told:
                    yield from self._judge(name, same[0])

    def _judge(self, name: str, training: str) -> Iterator[Finding]:
        validation, trained, sign = self._metrics.of[name], self._metrics.of[training], direction(name)
        if trained.count == validation.count == 1 and sign > 0 and validation.first >= PERFECT and trained.first < FAR:
            self._told.add(name)
            yield self._found(name, training, validation.steps[-1], validation.first, trained.first)
        if validation.count < 2 or trained.count != validation.count or self._compared.get(name) == validation.count:
            return
        self._compared[name] = validation.count
        before, now = validation.values[-2], trained.values[-1]
        noise = math.hypot(validation.noise, trained.noise)
        lead = sign * (before - now)
        better = lead > max(self.errors * noise, self.margin * max(abs(now), abs(before)))
        self._better[name] = self._better.get(name, 0) + 1 if better else 0
        if self._better[name] >= self.patience:
            self._told.add(name)
            yield self._found(name, training, validation.steps[-1], before, now)

    def _found(self, name: str, training: str, step: int, validation: float, trained: float) -> Finding:
        return self.finding(
            step,
            f"{name} is {validation:.3g}, better than {training} with {trained:.3g} in the epoch after it",
            where=name,
            evidence={"validation": validation, "training": trained},
            threshold=f"{self.errors:g} standard errors and {self.margin:.0%}, {self.patience} evaluations",
        )

    def missing(self) -> str:
        """Why it was not judged, or how many evaluations there were."""
        count = max(self._compared.values(), default=0)
        return self._why_not or (
            "" if count > self.patience or self._told else f"{count} of {self.patience + 1} evaluations beside a training metric"
        )

    def state_dict(self) -> dict[str, Any]:
        """The metrics' courses."""
        kept = {"better": dict(self._better), "compared": dict(self._compared), "told": sorted(self._told)}
        return {"metrics": self._metrics.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._metrics.load_state_dict(state["metrics"])
        self._better, self._compared, self._told = dict(state["better"]), dict(state["compared"]), set(state["told"])

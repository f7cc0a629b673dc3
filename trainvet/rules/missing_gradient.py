"""GR104: parameters that the loss does not reach."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass
class MissingGradient(Rule):
    """
    ## What it checks
    A trainable parameter of an optimizer whose gradient was None, or exactly zero, on every one of its first ``patience`` samples. Where an equally
    shaped sibling (``experts.0``, ``experts.3``) does receive gradients it may be conditional: then ``conditional`` samples. An error when more than
    half of the parameters are concerned, only information when all are biases or other one-dimensional tensors.
    ## Why it matters
    The part does not learn. A branch that is detached, a head that is never called or a layer that is dead from the start shows in no curve.
    ## What to do
    None: look for detach, no_grad, item, integer casts or argmax between the part and the loss, or freeze what is not used. Zero: look at the
    activation behind it, and at float16 underflow.
    ## Known limits
    A bias right before a normalisation layer has a gradient of zero by construction and is left out, and so is what is not trainable. A part that
    once received a gradient is not judged again.
    """

    code = "GR104"
    reads: ClassVar[frozenset[str]] = frozenset({"gradient.present", "gradient.norm"})
    severity: ClassVar[Severity] = Severity.WARNING
    causes = ("the part is not called, or detached from the loss", "an operation that ends the gradient: detach, no_grad, argmax, rounding, a cast")
    fixes = (
        "remove what cuts the gradient between this part and the loss",
        "if the part is not meant to train, set requires_grad (Keras: trainable) to False",
    )

    patience: int = 10
    conditional: int = 200

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._owned = 0
        self._kept = PerSubject(samples=0.0, none=0.0, reached=0.0, first=-1.0, told=0.0)

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which parameters count."""
        self._facts = facts
        owned = facts.owned
        chosen = [name for name, subject in facts.parameters.items() if subject.trainable and name in owned and subject.numel]
        self._owned = len(chosen)
        self._rows.choose(name for name in chosen if facts.parameters[name].role != "bias-before-norm")
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample."""
        column = snapshot.column("gradient.present")
        if column is None or not self._rows.find(column[0]):
            return
        names = self._rows.names
        present, norm = self._rows.values(snapshot, "gradient.present"), self._rows.values(snapshot, "gradient.norm")
        rows = self._kept.rows(names)
        reached = np.maximum(self._kept["reached"][rows], (present > 0) & (norm != 0))
        if bool(reached.all()):
            self._kept["samples"][rows] += 1
            self._kept["reached"][rows] = reached
            return
        samples = self._kept["samples"][rows] + 1
        first = np.where(samples == 1, snapshot.step, self._kept["first"][rows])
        none = self._kept["none"][rows] + (present == 0)
        told = self._kept["told"][rows]
        needed = np.array([self.conditional if self._has_live_sibling(name) else self.patience for name in names]) if not told.all() else 0
        due = (reached == 0) & (samples >= needed) & (told == 0)
        for key, values in (("samples", samples), ("reached", reached), ("first", first), ("none", none), ("told", np.maximum(told, due))):
            self._kept[key][rows] = values
        if due.any():
            yield self._tell(snapshot, [int(place) for place in np.flatnonzero(due)], names, none, samples, first)

    def _tell(self, snapshot: Snapshot, due: list[int], names: tuple[str, ...], none: Any, samples: Any, first: Any) -> Finding:
        chosen = self._facts.upstream_first(names[place] for place in due)
        cut = [names[place] for place in due if none[place] == samples[place]]
        shapes = [len(self._facts.parameters[name].shape) for name in chosen]
        severity = Severity.ERROR if len(chosen) > 0.5 * self._owned else Severity.WARNING if max(shapes) > 1 else Severity.INFO
        count = int(max(samples[place] for place in due))
        how = "none" if len(cut) == len(chosen) else "exactly zero" if not cut else "none or exactly zero"
        zero_fixes = ("look at the activation behind it: units that never fire pass nothing back", "in float16, use a loss scaler or bfloat16")
        return self.finding(
            snapshot.step,
            f"{len(chosen)} of {self._owned} parameters get no gradient: {how} on all of {count} samples",
            first_step=int(min(first[place] for place in due)),
            subjects=chosen,
            severity=severity,
            evidence={"parameters": len(chosen), "of": self._owned, "none": len(cut), "samples": count},
            threshold=f"{self.patience} samples ({self.conditional} where a sibling is reached)",
            causes=self.causes if cut else ("a layer that is dead or saturated from the start", "float16 underflow", *self.causes),
            fixes=self.fixes if cut else (*zero_fixes, *self.fixes),
        )

    def _has_live_sibling(self, name: str) -> bool:
        pattern = sibling(name)
        if pattern is None:
            return False
        shape = self._facts.parameters[name].shape
        alive = dict(zip(self._kept.names, self._kept["reached"] > 0, strict=True))
        return any(
            live and other != name and pattern.fullmatch(other) and self._facts.parameters.get(other) and self._facts.parameters[other].shape == shape
            for other, live in alive.items()
        )

    def missing(self) -> str:
        """How many samples there were."""
        most = int(self._kept["samples"].max()) if self._kept.names else 0
        return "" if most >= self.patience else f"{most} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """Counts by parameter."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state)


def sibling(name: str) -> re.Pattern[str] | None:
    """A pattern for names that differ from ``name`` in one of its integer parts (``experts.3.weight``, ``expert_3/kernel``); None without one."""
    parts = re.split(r"(\d+)", name)
    if len(parts) < 3:
        return None
    choices = ["".join(r"\d+" if place == index else re.escape(part) for place, part in enumerate(parts)) for index in range(1, len(parts), 2)]
    return re.compile("|".join(choices))

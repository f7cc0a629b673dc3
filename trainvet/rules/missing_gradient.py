"""GR104: parameters that never receive a gradient."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rows, Rule
from trainvet.statistics import Facts, Severance, Snapshot, Subject


@dataclasses.dataclass
class MissingGradient(Rule):
    """
    ## What it checks
    A trainable parameter that an optimizer holds has no gradient, or one that is exactly 0, on each of its first ``patience`` samples (the first
    10 steps are all sampled). One that the loss has no path to, as its autograd graph shows, is told at the 10th step, however few were sampled.
    Error for more than ``share`` of the parameters, information where only vectors and scalars are concerned.
    ## Why it matters
    It keeps the value it was initialised with; the rest trains, the loss falls, and nothing looks wrong.
    ## What to do
    No gradient at all: the module is not called, or detach(), no_grad() or .data cuts the way to the loss. Only zeros: dead units behind it, or a
    factor that is 0. Freeze what is not meant to train (requires_grad=False, trainable=False), or leave it out of the optimizer.
    ## Known limits
    A parameter with a numbered sibling of the same shape that does receive gradients (experts, layers that are dropped) gets ``conditional`` samples,
    if something upstream of it learns, unless an operation was seen that cut it off. Biases directly before a normalisation have a gradient of 0 by
    nature and do not count.
    """

    code = "GR104"
    reads: ClassVar[frozenset[str]] = frozenset({"gradient.present", "gradient.abs_max"})
    causes = (
        "not on a path to the loss: never called, detach(), no_grad() or .data",
        "dead units or a factor of 0 between it and the loss, or float16 underflow",
    )
    fixes = ("connect it to the loss", "freeze it, or leave it out of the optimizer, if it is not meant to train")

    patience: int = 10
    conditional: int = 200
    share: float = 0.5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._kept = PerSubject(samples=0.0, present=0.0, gradient=0.0, first=-1.0, told=0.0)
        self._total = 0
        self._families: dict[str, frozenset[tuple[Any, ...]]] = {}
        self._disconnected: frozenset[str] = frozenset()
        self._severed: dict[str, Severance] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which parameters are to learn, and which are numbered siblings of the same shape."""
        self._facts = facts
        chosen = {
            name: subject
            for name, subject in facts.parameters.items()
            if subject.trainable and subject.numel and name in facts.owned and not subject.tied_to and subject.role != "bias-before-norm"
        }
        self._rows.choose(chosen)
        self._disconnected = frozenset(facts.disconnected)
        self._severed = {name: cut for cut in facts.severed for name in cut.parameters}
        self._total = len(chosen)
        self._families = {name: frozenset(_families(subject)) for name, subject in chosen.items()}
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count a sample."""
        column = snapshot.column("gradient.abs_max") or snapshot.column("gradient.present")
        if column is None or not self._rows.find(column[0]):
            return
        names, kept = self._rows.names, self._kept
        rows = kept.rows(names)
        if bool(kept["gradient"][rows].all()):
            return
        present = ~(self._rows.values(snapshot, "gradient.present") == 0)
        kept["samples"][rows] += 1
        kept["present"][rows] = np.maximum(kept["present"][rows], present)
        kept["gradient"][rows] = np.maximum(kept["gradient"][rows], present & ~(self._rows.values(snapshot, "gradient.abs_max") == 0))
        kept["first"][rows] = np.where(kept["first"][rows] < 0, snapshot.step, kept["first"][rows])
        due = (kept["gradient"][rows] == 0) & (kept["told"][rows] == 0)
        due &= (kept["samples"][rows] >= self.patience) | np.array([name in self._disconnected for name in names])
        if due.any():
            late, learning = kept["samples"][rows] >= self.conditional, self._where("gradient")
            depths = [self._facts.parameters[name].depth for name in learning if name in self._facts.parameters]
            first = min((depth for depth in depths if depth >= 0), default=1 << 30)
            alive = frozenset(family for name in learning for family in self._families.get(name, ()))
            sure = [(row, late[row] or names[row] in self._severed) for row in np.flatnonzero(due).tolist()]
            told = [names[row] for row, certain in sure if certain or not self._conditional(names[row], first, alive)]
            if told:
                kept["told"][kept.rows(tuple(told))] = 1
                yield self._found(snapshot.step, self._facts.upstream_first(told))

    def _where(self, key: str) -> list[str]:
        return [self._kept.names[row] for row in np.flatnonzero(self._kept[key]).tolist()]

    def _conditional(self, name: str, first: int, alive: frozenset[tuple[Any, ...]]) -> bool:
        """May it be that this part was merely not used so far? A sibling learns (its family is in ``alive``), and so does something upstream
        (``first`` is the smallest depth that does)."""
        depth = self._facts.parameters[name].depth
        return (depth < 0 or first < depth) and not alive.isdisjoint(self._families.get(name, ()))

    def _found(self, step: int, told: tuple[str, ...]) -> Finding:
        rows, plan = self._kept.rows(told), self._facts.parameters
        absent = self._kept["present"][rows] == 0
        none = sum(bool(never) or name in self._disconnected for never, name in zip(absent.tolist(), told, strict=True))
        lacking = len(set(self._where("told")) - set(self._where("gradient")))
        what = (
            "get no gradient at all" if none == len(told) else "get only gradients of 0" if not none else f"get no gradient at all ({none}) or only 0"
        )
        if self._disconnected.issuperset(told):
            what = "have no path to the loss"
        cut = dict.fromkeys(self._severed[name] for name in told if name in self._severed)
        usual = self.causes if 2 * none >= len(told) else self.causes[::-1]
        small = all(len(plan[name].shape) < 2 for name in told)
        much = lacking > self.share * max(1, self._total)
        samples = int(self._kept["samples"][rows].max())
        return self.finding(
            step,
            f"{len(told)} of {self._total} parameters {what}",
            first_step=int(self._kept["first"][rows].min()),
            subjects=told,
            severity=Severity.ERROR if much else Severity.INFO if small else Severity.WARNING,
            evidence={"without gradient": none, "only zeros": len(told) - none, "parameters": self._total, "samples": samples},
            threshold=f"{self.patience} samples, {self.conditional} where a sibling learns",
            causes=(*(f"{item.operation} at {item.source or item.module}" for item in cut), *usual),
            fixes=(f"connect {told[0]} to the loss" if none else f"look at what comes after {told[0]}: AC101, or a factor of 0", self.fixes[1]),
        )

    def missing(self) -> str:
        """How many samples there were."""
        samples = self._kept["samples"]
        judged = len(samples) and (bool(self._kept["gradient"].all()) or samples.max() >= self.patience)
        return "" if judged else f"{int(samples.max()) if len(samples) else 0} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """Counts by parameter."""
        return {"kept": self._kept.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])


def _families(subject: Subject) -> Iterator[tuple[Any, ...]]:
    """What a parameter has in common with its numbered siblings: its shape, and its name with one of its numbers left open.

    A number that only counts layers of one type ("dense_3" of Keras) does not make a sibling.
    """
    parts = subject.name.split(".")
    for place, part in enumerate(parts):
        base = re.fullmatch(r"(\D*?)_?\d+", part)
        if base and not (base[1] and base[1].replace("_", "").lower() == subject.module_type.lower()):
            yield subject.shape, place, base[1], (*parts[:place], *parts[place + 1 :])

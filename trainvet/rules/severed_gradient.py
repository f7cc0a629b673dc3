"""GR108: an operation ends the gradient between a trainable parameter and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Facts, Severance, Snapshot

REMEDIES = {
    "detach": "remove detach()",
    "data": "use the tensor itself in place of .data",
    "no_grad": "take the computation out of torch.no_grad()",
    "inference_mode": "take the computation out of torch.inference_mode()",
    "stop_gradient": "remove stop_gradient",
    "item": "keep the tensor: no item(), float() or int()",
    "numpy": "stay with tensors: no numpy()",
    "tensor": "do not build a new tensor from values: keep the one that was computed, or use torch.stack",
    "argmax": "hand the scores on in place of argmax: a softmax, or gumbel_softmax(hard=True)",
    "argmin": "hand the scores on in place of argmin: a softmax, or gumbel_softmax(hard=True)",
}
STEPWISE = ("round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside")
CASTS = ("int", "long", "short", "bool", "cast", "to")


@dataclasses.dataclass
class SeveredGradient(Rule):
    """
    ## What it checks
    The traced step: an operation without derivative (detach, no_grad, rounding, argmax, integer cast, item) lies on every way from a trainable
    parameter that an optimizer holds to the loss. Found in the graph, hence exact; information where only vectors are cut off.
    ## Why it matters
    What lies before the operation keeps the values it was initialised with. The rest trains, the loss falls, and nothing looks wrong.
    ## What to do
    Take the operation out, or put a differentiable one in its place. Freeze what is not meant to train.
    ## Known limits
    Parameters with another way to the loss are left alone: straight-through estimators, targets, stop-gradient by design. Information where
    weights were loaded or a finetuning callback is in use: a cut behind a loaded backbone is then meant. An operation that only some batches meet
    is seen if the traced one does.
    """

    code = "GR108"
    reads: ClassVar[frozenset[str]] = frozenset({"gradient.present"})
    severity = Severity.ERROR
    causes = ("the operation was meant for logging or for a target, and its result is used in the loss",)
    fixes = ("take the operation out of the way to the loss", "freeze what is not meant to train (requires_grad = False)")

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._known = False
        self._facts, self._fresh = Facts(), False
        self._since = PerSubject(first=-1.0)  # since when a parameter has had no gradient

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Judge what the trace has shown; where steps were seen before it, with the next one, from the step on that shows it first."""
        self._facts, self._fresh = facts, True
        self._known = self._known or bool(facts.severed or facts.disconnected or facts.layers)
        return () if self._since.names else self._judge(0)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Note which parameters have no gradient."""
        column = snapshot.column("gradient.present")
        if column is not None:
            rows = self._since.rows(column[0])
            first = self._since["first"][rows]
            self._since["first"][rows] = np.where(column[1] == 0, np.where(first < 0, snapshot.step, first), -1.0)
        return self._judge(snapshot.step)

    def end(self, step: int) -> Iterable[Finding]:
        """What the last step's trace has shown."""
        return self._judge(step)

    def _judge(self, step: int) -> Iterator[Finding]:
        facts, fresh = self._facts, self._fresh
        self._fresh = False
        if not (fresh and facts.severed):
            return
        trainable = {name for name, subject in facts.parameters.items() if subject.trainable and (not facts.owned or name in facts.owned)}
        for cut in facts.severed:
            names = facts.upstream_first(name for name in dict.fromkeys(cut.parameters) if name in trainable)
            if names and _key(cut) not in self._told:
                self._told.add(_key(cut))
                yield self._found(step, cut, names, len(trainable))

    def _found(self, step: int, cut: Severance, names: tuple[str, ...], total: int) -> Finding:
        facts = self._facts
        since = self._since["first"][[self._since.names.index(names[0])]] if names[0] in self._since.names else np.array([-1.0])
        vectors = all(len(facts.parameters[name].shape) < 2 for name in names)
        meant = facts.pretrained or facts.finetuning
        at = f" at {cut.source}" if cut.source else ""
        inside = f" in {cut.module}" if cut.module else ""
        return self.finding(
            step,
            f"{cut.operation}{inside}{at} ends the gradient: {len(names)} of {total} trainable parameters never learn",
            first_step=min(step, int(since[0])) if since[0] >= 0 else step,
            subjects=names,
            severity=Severity.INFO if vectors or meant else Severity.ERROR,
            evidence={"operation": cut.operation, "module": cut.module, "source": cut.source, "parameters": len(names), "trainable": total},
            threshold="a way with a gradient from every trainable parameter to the loss",
            fixes=(remedy(cut.operation) + at, self.fixes[1]),
        )

    def missing(self) -> str:
        """Without a traced step there is nothing to judge."""
        return "" if self._known else "no traced step"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": sorted(self._told), "known": self._known, "since": self._since.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told, self._known = set(state["told"]), bool(state["known"])
        self._since.load_state_dict(state["since"])


def remedy(operation: str) -> str:
    """What to do about an operation, whatever it is written like: "torch.round", "detach_()", "Tensor.argmax"."""
    name = operation.lower().rpartition(".")[2].partition("(")[0].strip("_ ")
    if name in REMEDIES:
        return REMEDIES[name]
    if name in STEPWISE:
        return f"pass the gradient straight through, x + (y - x).detach() with y = {name}(x), or leave {name} out"
    if name in CASTS:
        return "stay with floating numbers: no cast to integers or booleans"
    return f"take {operation} out of the way to the loss"


def _key(cut: Severance) -> str:
    return f"{cut.operation}@{cut.module}@{cut.source}"

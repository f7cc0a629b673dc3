"""LR105: a setting of the optimizer that cannot be meant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Optimizer, Snapshot

EDGE = 1.000001
DIVIDES_BY_ZERO = ("adam", "nadam", "rmsprop")  # with an epsilon of 0 and a gradient of 0; others have no such term or another one


@dataclasses.dataclass
class ImplausibleHyperParameter(Rule):
    """
    ## What it checks
    Warnings: SGD with a momentum of ``momentum`` or more and an effective rate lr/(1-momentum) above ``effective``; a momentum of 1 or more, or below
    0; betas outside [0, 1); an epsilon of 0; weight decay times learning rate above ``decay`` in one step (over 1-momentum where SGD adds it to the
    gradient), or below 0; a clipping threshold of 0. Information: an epsilon of ``epsilon`` or more, and betas that look swapped.
    ## Why it matters
    These numbers multiply each other: momentum 0.999 makes every rate a thousand times larger, and decay takes that share of the weights per step.
    ## What to do
    Set the number named to the usual value beside it.
    ## Known limits
    Optimizers with other conventions are judged only by what is wrong for all. Rates are those really used, so that a warm-up is judged on its way.
    """

    code = "LR105"
    reads: ClassVar[frozenset[str]] = frozenset({"optimizer.learning_rate"})
    causes = ("a typing error or a value taken from another optimizer or library", "two settings that multiply each other were changed together")
    fixes = ("use the optimizer's default for this setting",)

    momentum: float = 0.99
    effective: float = 1.0
    epsilon: float = 1e-3
    decay: float = 0.01

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._of: dict[str, Optimizer] = {}
        self._told: set[str] = set()

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What can be judged without the learning rate."""
        self._facts = facts
        self._of = {group: item for item in facts.optimizers for group in item.groups}
        if facts.clipping is not None and facts.clipping <= 0:
            text = f"gradients are clipped at {facts.clipping:g}, so that nothing is left of them"
            yield from self._tell(
                "clipping", "", 0, text, "a clipping threshold above 0", "clip at 1.0, or switch clipping off", numbers={"clipping": facts.clipping}
            )
        for item in facts.optimizers:
            yield from self._static(item)

    def _static(self, item: Optimizer) -> Iterable[Finding]:
        wrong = [beta for beta in item.betas if not 0 <= beta < 1]
        if wrong:
            usual = "betas=(0.9, 0.999)"
            text = f"a beta of {wrong[0]:g} makes the average grow without end" if wrong[0] >= 1 else f"a beta of {wrong[0]:g} is below 0"
            yield from self._tell(
                "betas", item.name, 0, text, "betas of at least 0 and below 1", f"set {usual} (now {_pair(item)})", numbers={"beta": wrong[0]}
            )
        elif item.family == "adam" and len(item.betas) > 1 and item.betas[0] > math.sqrt(item.betas[1]) and item.betas[0] > 0.9:
            text = f"betas {_pair(item)} look swapped: the average of the squares is shorter than that of the gradients"
            fix = f"set betas=({item.betas[1]:g}, {item.betas[0]:g})"
            yield from self._tell("swapped", item.name, 0, text, "beta1 below the root of beta2", fix, Severity.INFO, numbers={"beta": item.betas[0]})
        if not 0 <= item.momentum < 1:
            text = (
                f"a momentum of {item.momentum:g} never forgets a gradient" if item.momentum >= 1 else f"a momentum of {item.momentum:g} is below 0"
            )
            yield from self._tell(
                "momentum", item.name, 0, text, "momentum in [0, 1)", f"set momentum=0.9 (now {item.momentum:g})", numbers={"momentum": item.momentum}
            )
        if item.family == "adam" and item.epsilon == 0 and item.type.lower().removeprefix("fused").startswith(DIVIDES_BY_ZERO):
            text = "an epsilon of 0 divides by 0 wherever a gradient is 0"
            yield from self._tell("epsilon", item.name, 0, text, "an epsilon above 0", "set eps=1e-8 (now 0)", numbers={"epsilon": 0.0})
        elif item.family == "adam" and item.epsilon >= self.epsilon:
            text = f"an epsilon of {item.epsilon:g} outweighs small gradients: the steps are no longer adaptive"
            fix = f"set eps=1e-8 (now {item.epsilon:g})"
            yield from self._tell(
                "epsilon", item.name, 0, text, f"an epsilon below {self.epsilon:g}", fix, Severity.INFO, numbers={"epsilon": item.epsilon}
            )
        if item.weight_decay < 0:
            text = f"a weight decay of {item.weight_decay:g} makes the weights grow"
            yield from self._tell(
                "decay", item.name, 0, text, "a weight decay of at least 0", "set weight_decay=0.01", numbers={"decay": item.weight_decay}
            )

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """What the learning rate multiplies."""
        return sorted(self._multiplied(snapshot), key=lambda finding: finding.step)

    def _multiplied(self, snapshot: Snapshot) -> Iterable[Finding]:
        for group, track in snapshot.tracks("optimizer.learning_rate").items():
            item = self._of.get(group)
            if item is None or not 0 <= item.momentum < 1:
                continue
            sgd = item.family == "sgd"
            share = 1 - item.momentum if sgd else 1.0
            seen = np.where(np.isfinite(track.values), track.values, 0.0)
            rates, decayed = seen / share, seen / (share if item.coupled_decay else 1.0)
            if sgd and item.momentum >= self.momentum and f"momentum {item.name}" not in self._told:
                over = np.flatnonzero(rates > self.effective * EDGE)
                if len(over):
                    rate = float(rates[over[0]])
                    text = f"momentum {item.momentum:g} makes the learning rate {rate * share:.3g} act like {rate:.3g}"
                    fix = f"set momentum=0.9, or the learning rate to about {0.1 * share:.1g} (now {rate * share:.3g})"
                    numbers = {"effective_rate": rate, "momentum": item.momentum}
                    yield from self._tell(
                        "momentum", item.name, int(track.steps[over[0]]), text, f"{self.effective:g}, as lr/(1-momentum)", fix, numbers=numbers
                    )
            if item.weight_decay > 0 and not (item.coupled_decay and item.family == "adam") and f"decay {item.name}" not in self._told:
                over = np.flatnonzero(decayed * item.weight_decay > self.decay * EDGE)
                if len(over):
                    rate = float(decayed[over[0]])
                    text = f"weight decay {item.weight_decay:g} takes {min(rate * item.weight_decay, 1):.2g} of the weights at each step"
                    fix = f"set weight_decay={min(1e-4 / rate, item.weight_decay / 100):.1g} (now {item.weight_decay:g})"
                    numbers = {"share_per_step": rate * item.weight_decay, "weight_decay": item.weight_decay}
                    limit = f"{self.decay:g} of the weights per step"
                    yield from self._tell("decay", item.name, int(track.steps[over[0]]), text, limit, fix, numbers=numbers)

    def _tell(
        self, key: str, name: str, step: int, text: str, limit: str, fix: str, level: Severity = Severity.WARNING, *, numbers: Mapping[str, float]
    ) -> Iterable[Finding]:
        known = f"{key} {name}"
        if known in self._told:
            return
        self._told.add(known)
        evidence = {shown.replace("_", " "): float(value) for shown, value in numbers.items()}
        yield self.finding(step, text, where=name or "clipping", severity=level, evidence=evidence, threshold=limit, fixes=(fix,))

    def missing(self) -> str:
        """Without an optimizer there is nothing to judge."""
        return "" if self._facts.optimizers else "no optimizer is known"

    def state_dict(self) -> dict[str, Any]:
        """What was told."""
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])


def _pair(item: Optimizer) -> str:
    return f"({', '.join(f'{beta:g}' for beta in item.betas)})"

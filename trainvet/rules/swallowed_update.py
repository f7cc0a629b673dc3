"""WT103: updates that are lost in the rounding of float16 or bfloat16 weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.half import SHORT
from trainvet.learning_rate import LearningRate
from trainvet.matrices import median
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot, Vector

WHOLE = "all matrices"
SETTLED = 0.01


@dataclasses.dataclass
class SwallowedUpdate(Rule):
    """
    ## What it checks
    Of the elements of a float16 or bfloat16 weight that have a gradient, the share that did not change in the step. A warning where the median over
    the matrices (over all weights where there is none) is above ``share`` on ``patience`` samples in a row, after the warm-up; information for
    single weights.
    ## Why it matters
    bfloat16 keeps 8 bits: an update below 2^-9 to 2^-8 of the weight is rounded away, at every step, however many follow. Gains at 1.0 never move at
    a rate of 1e-3. The loss falls for a while and then stands.
    ## What to do
    Keep the weights in float32 and compute in the narrow type (mixed precision), or round stochastically.
    ## Known limits
    Not judged: rates at or below 1 % of their peak or still rising, weights the optimizer does not hold (it then has float32 copies). Under
    stochastic rounding the share stays below the limit by itself.
    """

    code = "WT103"
    reads: ClassVar[frozenset[str]] = frozenset({"update.swallowed_share", "optimizer.learning_rate"})
    causes = ("weights in a 16-bit type without float32 copies", "a learning rate too low for the number format")
    fixes = ("keep float32 weights (mixed precision)", "round stochastically in the optimizer")

    share: float = 0.9
    patience: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._rows = Rows()
        self._rate = LearningRate()
        self._warn, self._mild = Streak(self.patience), Streak(self.patience)
        self._narrow = False
        self._wide: frozenset[str] = frozenset()
        self._samples = 0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which weights are narrow and moved by an optimizer itself."""
        self._facts = facts
        self._rate.begin(facts)
        owned, copies = facts.owned, any(item.unknown_parameters for item in facts.optimizers)
        chosen = [
            name for name, item in facts.parameters.items() if item.trainable and item.dtype in SHORT and (name in owned or not (owned or copies))
        ]
        self._narrow = bool(chosen)
        self._wide = frozenset(name for name in chosen if facts.parameters[name].is_matrix)
        self._rows.choose(chosen)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Count the samples on which most elements stood still."""
        self._rate.follow(snapshot)
        column = snapshot.column("update.swallowed_share")
        if column is None or not self._rows.find(column[0]):
            return
        names, share = self._rows.names, self._rows.values(snapshot, "update.swallowed_share")
        speaks = np.isfinite(share) & self._rate.settled(names, SETTLED)
        if not speaks.any():
            return
        self._samples += 1
        matrix = self._rows.among(self._wide)
        judged = speaks & matrix if (speaks & matrix).any() else speaks
        middle = median(share[judged])
        if self._warn.update((WHOLE,), np.array([middle > self.share]), snapshot.step):
            yield self._tell(snapshot, names, share, judged & (share > self.share), middle, None, self._warn.first(WHOLE))
        rows = np.flatnonzero(speaks)
        kept = names if len(rows) == len(names) else tuple(names[row] for row in rows)
        due = self._mild.update(kept, share[rows] > self.share, snapshot.step)
        if due and not middle > self.share:
            chosen = np.isin(np.arange(len(names)), rows[due])
            yield self._tell(snapshot, names, share, chosen, median(share[chosen]), Severity.INFO, min(self._mild.first(kept[row]) for row in due))

    def _tell(
        self, snapshot: Snapshot, names: tuple[str, ...], share: Vector, chosen: Any, middle: float, severity: Severity | None, since: int
    ) -> Finding:
        places = self._facts.upstream_first(names[row] for row in np.flatnonzero(chosen))
        dtype = self._facts.parameters[places[0]].dtype
        rate = self._rate.stated(places)
        return self.finding(
            snapshot.step,
            f"{middle:.0%} of the elements with a gradient did not change{rate}: the update is lost in {dtype} rounding ({len(places)} weights)",
            first_step=since,
            subjects=places,
            severity=severity,
            evidence={"swallowed share": middle, "weights": len(places)},
            threshold=f"{self.share:.0%} on {self.patience} samples in a row",
            fixes=(self._mixed(dtype), self.fixes[1]),
        )

    def _mixed(self, dtype: str) -> str:
        short = "bf16" if dtype == "bfloat16" else "16"
        return {
            "lightning": f'keep float32 weights: Trainer(precision="{short}-mixed") (now {self._facts.precision})',
            "keras": f'keep float32 weights: keras.mixed_precision.set_global_policy("mixed_{dtype}")',
        }.get(self._facts.framework, f"keep float32 weights: model.float(), and torch.autocast(device_type, dtype=torch.{dtype}) around the forward")

    def missing(self) -> str:
        """How many samples there were."""
        if not self._narrow:
            return "no trainable float16 or bfloat16 weight was seen"
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples after the warm-up"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return {"warn": self._warn.state_dict(), "mild": self._mild.state_dict(), "samples": self._samples, "rate": self._rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._warn.load_state_dict(state["warn"])
        self._mild.load_state_dict(state["mild"])
        self._rate.load_state_dict(state["rate"])
        self._samples = int(state["samples"])

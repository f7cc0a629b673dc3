"""LS103: gradients too small for float16, rounded towards 0 or to 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.half import belongs, computes_in
from trainvet.matrices import median
from trainvet.rolling import Rollings
from trainvet.rule import Rows, Rule, Streak
from trainvet.statistics import Facts, Snapshot

WHOLE, ALL = "the run", "all zero"
CONVERGED = 0.01  # of the first losses: gradients may then be as small as they like


@dataclasses.dataclass
class GradientUnderflow(Rule):
    """
    ## What it checks
    Subnormal: the share of a matrix's non-zero gradient elements whose scaled size is below 2^-14, on ``patience`` samples in a row. Information
    above ``share``; a warning where half of the matrices are above ``most``, or one is above ``nearly``. Flushed: from applied step ``after`` on,
    gradients of exactly 0 in most weights of the float16 part on ``patience`` samples in a row, with a finite loss other than 0.
    ## Why it matters
    float16 loses precision below 2^-14 and becomes 0 below 2^-24: a layer trains on what is left of its gradient, or not at all.
    ## What to do
    Use a dynamic loss scaler, a larger scale, or bfloat16, which has the range of float32.
    ## Known limits
    Zeros do not count in the share. A loss below 1 % of its start is convergence. Layers that give only 0 have another reason (AC101, AC104) and take
    the second clause away. The shares are provisional: no published ones are known.
    """

    code = "LS103"
    reads: ClassVar[frozenset[str]] = frozenset(
        {"gradient.underflow_share", "gradient.abs_max", "gradient.present", "activation.abs_max", "loss.value", "run.loss_scale"}
    )
    causes = ("no loss scaler, or one that is too small", "a loss multiplied by a tiny factor", "a scale that collapsed after overflows")
    fixes = ("compute in bfloat16", "scale the loss: a dynamic scaler that starts at 65536")

    share: float = 0.1
    most: float = 0.5
    nearly: float = 0.9
    patience: int = 5
    after: int = 5

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._half = False
        self._matrices, self._inside = Rows(), Rows()
        self._loss = Rollings(10, start=0.0)
        self._mild, self._warn, self._zero = Streak(self.patience), Streak(self.patience), Streak(self.patience)
        self._samples, self._scale = 0, 0.0

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which weights take part in float16 computations."""
        self._facts, self._half = facts, computes_in(facts) == "float16"
        owned = facts.owned
        movable = [item for name, item in facts.parameters.items() if item.trainable and (not owned or name in owned) and not item.tied_to]
        self._matrices.choose(item.name for item in movable if item.is_matrix)
        narrow = frozenset(item.module for item in facts.of("activation").values() if item.dtype == "float16")
        inside = [item.name for item in movable if belongs(item.module, narrow) or item.dtype == "float16"]
        self._inside.choose(inside or [item.name for item in movable] if self._half else ())
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sample."""
        for track in snapshot.tracks("run.loss_scale").values():
            self._scale = float(track.values[-1])
        for _, rows, _ in self._loss.add(snapshot, "loss.value"):
            if not rows.kept["start"] and rows.count >= 10:
                rows.kept["start"] = median(np.abs(rows.values[:10]))
        if not self._half or not snapshot.sampled or any(self._learnt(rows.kept["start"], rows.values) for rows in self._loss.all()):
            return
        yield from self._subnormal(snapshot)
        yield from self._flushed(snapshot)

    def _subnormal(self, snapshot: Snapshot) -> Iterable[Finding]:
        column = snapshot.column("gradient.underflow_share")
        if column is None or not self._matrices.find(column[0]):
            return
        self._samples += 1
        names, share = self._matrices.names, self._matrices.values(snapshot, "gradient.underflow_share")
        moving = self._matrices.values(snapshot, "gradient.abs_max")
        known = np.isfinite(share) & ~(moving == 0)
        middle = median(share[known]) if known.any() else 0.0
        whole = self._zero.update((WHOLE,), np.array([middle > self.most]), snapshot.step)
        worst = self._warn.update(names, known & (share > self.nearly), snapshot.step)
        mild = self._mild.update(names, known & (share > self.share), snapshot.step)
        if worst or whole:
            limit = self.most if whole else self.nearly
            places = [names[row] for row in np.flatnonzero(known & (share > limit)).tolist()]
            yield self._tell(
                snapshot,
                places,
                share[known].max(),
                Severity.WARNING,
                min(first for first in [*map(self._warn.first, places), self._zero.first(WHOLE)] if first >= 0),
            )
        elif mild:
            yield self._tell(
                snapshot, [names[row] for row in mild], share[mild].max(), Severity.INFO, min(self._mild.first(names[row]) for row in mild)
            )

    def _tell(self, snapshot: Snapshot, places: list[str], share: float, severity: Severity, since: int) -> Finding:
        scale = f" at a loss scale of {self._scale:g}" if self._scale > 0 else " without a loss scale"
        return self.finding(
            snapshot.step,
            f"up to {share:.0%} of the gradient elements are below 2^-14, where float16 loses precision{scale} ({len(places)} weights)",
            first_step=since,
            subjects=self._facts.upstream_first(places),
            severity=severity,
            evidence={"underflow share": float(share), "weights": len(places), "loss scale": self._scale},
            threshold=f"{self.share:.0%}, warning above {self.most:.0%} in half of the matrices or {self.nearly:.0%} in one",
            causes=self.causes[1:] if self._facts.loss_scaler else self.causes,
            fixes=self._fixes(),
        )

    def _flushed(self, snapshot: Snapshot) -> Iterable[Finding]:
        column = snapshot.column("gradient.abs_max")
        outputs = snapshot.column("activation.abs_max")
        losses = [float(rows.values[-1]) for rows in self._loss.all() if len(rows.values)]
        if column is None or snapshot.applied < self.after or not self._inside.find(column[0]):
            return
        self._samples += snapshot.column("gradient.underflow_share") is None
        alive = bool(losses) and all(np.isfinite(loss) and loss != 0 for loss in losses)
        top, present = (self._inside.values(snapshot, f"gradient.{key}") for key in ("abs_max", "present"))
        zero = (top == 0) & ~(present == 0)
        dead = outputs is not None and bool(np.any(outputs[1] == 0))
        due = self._zero.update((ALL,), np.array([alive and not dead and 2 * zero.sum() > len(zero)]), snapshot.step)
        if due:
            names = self._facts.upstream_first(name for name, flat in zip(self._inside.names, zero, strict=True) if flat)
            yield self.finding(
                snapshot.step,
                f"the gradients of {len(names)} of {len(zero)} float16 weights are exactly 0 while the loss is {losses[0]:.3g}: they underflow",
                first_step=self._zero.first(ALL),
                subjects=names,
                evidence={"weights": len(names), "of": len(zero), "loss": losses[0], "loss scale": self._scale},
                threshold=f"most of them, on {self.patience} samples in a row",
                causes=self.causes[1:] if self._facts.loss_scaler else self.causes,
                fixes=self._fixes(),
            )

    def _fixes(self) -> tuple[str, ...]:
        where = {"lightning": 'Trainer(precision="bf16-mixed")', "keras": 'keras.mixed_precision.set_global_policy("mixed_bfloat16")'}
        first = f"compute in bfloat16: {where.get(self._facts.framework, 'torch.autocast(device_type, dtype=torch.bfloat16)')}"
        if self._facts.loss_scaler:
            return (first, f"do not multiply the loss by a small factor, and let the scale grow (now {self._scale:g})")
        return (first, self.fixes[1])

    @staticmethod
    def _learnt(start: float, values: Any) -> bool:
        return start > 0 and median(np.abs(values[-10:])) < CONVERGED * start

    def missing(self) -> str:
        """Is there a float16 part, and how often was it looked at?"""
        if not self._half:
            return "no float16 computation was seen"
        return "" if self._samples >= self.patience else f"{self._samples} of {self.patience} samples"

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        streaks = {"mild": self._mild.state_dict(), "warn": self._warn.state_dict(), "zero": self._zero.state_dict()}
        return {**streaks, "loss": self._loss.state_dict(), "samples": self._samples, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._mild.load_state_dict(state["mild"])
        self._warn.load_state_dict(state["warn"])
        self._zero.load_state_dict(state["zero"])
        self._loss.load_state_dict(state["loss"])
        self._samples, self._scale = int(state["samples"]), float(state["scale"])

"""LS102: the loss scale falls and falls, and no step is applied any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Snapshot


@dataclasses.dataclass
class CollapsedLossScale(Rule):
    """
    ## What it checks
    At attempted steps: the loss scale has fallen below ``lowest``, or it was lowered ``halvings`` times without one growth, or ``skips`` steps in a
    row were skipped. From ``fatal`` skipped steps in a row on it is fatal.
    ## Why it matters
    Every skipped step leaves the weights as they are while the loss looks normal: the run can go on like this for ever.
    ## What to do
    Find the operation that overflows float16 (the last layer and the loss first) and run it in float32 or the whole net in bfloat16.
    ## Known limits
    A scaler that starts far too high may lower its scale some times before the first step is applied; fewer than ``skips`` are calibration.
    """

    code = "LS102"
    reads: ClassVar[frozenset[str]] = frozenset({"run.loss_scale", "run.skipped"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = (
        "an operation overflows float16 on every step: exp, a norm, a division, a sum over many elements",
        "a NaN in the weights or the data",
        "the loss is far too large for float16, such as a sum instead of a mean",
    )
    fixes = (
        "run the operation that overflows in float32: torch.autocast(enabled=False), or a float32 dtype policy for that layer",
        "use bfloat16, which needs no loss scale",
    )

    lowest: float = 1.0
    halvings: int = 10
    skips: int = 10
    fatal: int = 20

    def __post_init__(self) -> None:
        self._last, self._worked, self._start = 0.0, 0.0, 0.0
        self._lowered, self._lowered_from = 0, 0
        self._row, self._row_from = 0, 0
        self._told = 0

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every attempted step; blocks in which nothing is skipped or lowered are passed over."""
        scales = next(iter(snapshot.tracks("run.loss_scale").values()), None)
        skipped = next(iter(snapshot.tracks("run.skipped").values()), None)
        if scales is None or skipped is None:
            return
        flags = dict(zip(skipped.steps.tolist(), (skipped.values > 0).tolist(), strict=True))
        calm = not any(flags.values()) and bool((scales.values == self._last).all()) and self._last >= self.lowest
        if calm:
            self._row, self._told, self._worked = 0, 0, self._last
            return
        for step, scale in zip(scales.steps.tolist(), scales.values.tolist(), strict=True):
            yield from self._judge(step, scale, flags.get(step, False))

    def _judge(self, step: int, scale: float, skipped: bool) -> Iterable[Finding]:
        self._start = self._start or scale
        if self._last and scale < self._last:
            self._lowered_from = self._lowered_from if self._lowered else step
            self._lowered += 1
        elif scale > self._last:
            self._lowered = 0
        self._last = scale
        self._row_from = self._row_from if self._row else step
        self._row = self._row + 1 if skipped else 0
        if not skipped:
            self._worked = scale
        fell = not scale >= self.lowest and self._start >= self.lowest
        lowered = self._lowered >= self.halvings
        bad = fell or lowered or self._row >= self.skips
        if not bad:
            self._told = 0 if not skipped else self._told
            return
        severity = Severity.FATAL if self._row >= self.fatal else Severity.ERROR
        if self._told >= severity:
            return
        self._told = int(severity)
        first = self._row_from if self._row >= self.skips else self._lowered_from if lowered or fell else step
        what = f"{self._row} steps in a row were skipped" if self._row >= self.skips else f"it was lowered {self._lowered} times without one growth"
        start = f"start the scaler at init_scale={self._worked:g}, where steps were applied" if self._worked >= 1 else "start the scaler at 4096"
        yield self.finding(
            step,
            f"the loss scale is down to {scale:g} (from {self._start:g}) and {what}: the weights stand still",
            first_step=min(first, step),
            where="loss scale",
            severity=severity,
            evidence={"loss scale": scale, "skipped in a row": self._row, "lowered": self._lowered},
            threshold=f"scale {self.lowest:g}, {self.halvings} times lowered, {self.skips} skips in a row ({self.fatal} fatal)",
            fixes=(*self.fixes, start),
        )

    def state_dict(self) -> dict[str, Any]:
        """The scale's course so far."""
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for key in STATE:
            setattr(self, key, state[key])


STATE = ("_last", "_worked", "_start", "_lowered", "_lowered_from", "_row", "_row_from", "_told")

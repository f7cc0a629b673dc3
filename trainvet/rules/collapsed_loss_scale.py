"""LS102: the loss scale falls and falls, and steps are skipped without end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Snapshot

SETTLED = 20  # applied steps in a row after which the scaler has found its size; what was lowered before that was its search


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
    A scaler that starts far too high may lower its scale some times before the first step is applied: fewer than ``skips`` are calibration. A scale
    that was below ``lowest`` from the start was chosen so and is judged by the other two signs.
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
        self._kept: dict[str, float] = {"start": 0.0, "last": 0.0, "worked": 0.0, "lowered": 0, "lowered from": 0, "row": 0, "row from": 0, "told": 0}
        self._kept["clean"] = 0

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge every attempted step; a block in which nothing is skipped and the scale stays is passed over."""
        scales = next(iter(snapshot.tracks("run.loss_scale").values()), None)
        skipped = next(iter(snapshot.tracks("run.skipped").values()), None)
        if scales is None or skipped is None:
            return
        flags = dict(zip(skipped.steps.tolist(), (skipped.values > 0).tolist(), strict=True))
        calm = not any(flags.values()) and bool((scales.values == self._kept["last"]).all())
        first = 0 if not calm else len(scales.steps) - 1  # in a calm block every row says the same
        self._kept["clean"] += first
        for step, scale in zip(scales.steps[first:].tolist(), scales.values[first:].tolist(), strict=True):
            yield from self._judge(step, scale, flags.get(step, False))

    def _judge(self, step: int, scale: float, skipped: bool) -> Iterable[Finding]:
        kept = self._kept
        kept["start"] = kept["start"] or scale
        if scale < kept["last"]:
            kept.update({"lowered": kept["lowered"] + 1, "lowered from": kept["lowered from"] if kept["lowered"] else step})
        elif scale > kept["last"]:
            kept["lowered"] = 0
        if skipped:
            kept["clean"] = kept["clean"] if kept["clean"] >= SETTLED else 0
            kept.update({"row": kept["row"] + 1, "row from": kept["row from"] if kept["row"] else step})
        else:
            settled = kept["clean"] < SETTLED <= kept["clean"] + 1 and not kept["told"]
            kept.update({"row": 0, "worked": scale, "clean": kept["clean"] + 1, "lowered": 0 if settled else kept["lowered"]})
        kept["last"] = scale
        fell = not scale >= self.lowest and kept["start"] >= self.lowest
        stuck = kept["row"] >= self.skips
        if not (fell or stuck or kept["lowered"] >= self.halvings):
            kept["told"] = kept["told"] if skipped else 0
            return
        severity = Severity.FATAL if kept["row"] >= self.fatal else Severity.ERROR
        if kept["told"] >= severity:
            return
        kept["told"] = int(severity)
        lowered = f"it was lowered {kept['lowered']:.0f} times without one growth"
        yield self.finding(
            step,
            f"the loss scale is down to {scale:g} (from {kept['start']:g}) and "
            + (f"{kept['row']:.0f} steps in a row were skipped: the weights stand still" if stuck else f"{lowered}: more and more steps are skipped"),
            first_step=int(kept["row from"] if stuck else kept["lowered from"]),
            where="loss scale",
            severity=severity,
            evidence={"loss scale": scale, "skipped in a row": int(kept["row"]), "lowered": int(kept["lowered"])},
            threshold=f"scale {self.lowest:g}, {self.halvings} times lowered, {self.skips} skips in a row ({self.fatal} fatal)",
            fixes=(*self.fixes, *([f"start the scaler at {kept['worked']:g}, where a step was applied last"] if kept["worked"] else [])),
        )

    def state_dict(self) -> dict[str, Any]:
        """The scale's course so far."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept = dict(state)

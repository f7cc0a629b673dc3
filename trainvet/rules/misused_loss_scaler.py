"""LS104: a loss scaler that is missing, not needed, or worked around."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.half import computes_in
from trainvet.matrices import median
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot, Vector

CLIPPED = 0.999
SCALES = 7  # remembered besides the present one
CLOSE = 0.02  # how closely norm after clipping times scale must repeat the threshold
NARROW = "a float16 model or an autocast to float16 without a loss scaler"
WIDE = "a loss scaler that was left in place when float16 gave way to bfloat16"
EARLY = "the gradients are clipped while they are still multiplied by the loss scale"


@dataclasses.dataclass
class MisusedLossScaler(Rule):
    """
    ## What it checks
    A float16 computation in a part that trains, without a loss scaler. A loss scaler together with bfloat16. Clipping before unscaling: on ``steps``
    clipped steps the norm after clipping times the loss scale is the clipping threshold, or it is one and the same number under scales that differ.
    ## Why it matters
    Without a scaler small float16 gradients become 0. With bfloat16, which has the range of float32, a scaler does nothing but skip steps. Clipping
    scaled gradients shrinks every update by the scale: the run trains at a fraction of its rate.
    ## What to do
    One scaler for float16, none for bfloat16, and scaler.unscale_(optimizer) before the gradients are clipped.
    ## Known limits
    A loss that is scaled by hand, or by a scaler that was not handed to watch(), is not seen. A frozen float16 part (a teacher, a loaded encoder)
    does not count.
    """

    code = "LS104"
    reads: ClassVar[frozenset[str]] = frozenset({"run.gradient_norm", "run.clip_scale", "run.loss_scale"})
    causes = (NARROW, WIDE, EARLY)
    fixes = (
        "use torch.amp.GradScaler and hand it to watch(…, scaler=scaler), or compute in bfloat16",
        "take the loss scaler out",
        "call scaler.unscale_(optimizer) before the gradients are clipped",
    )

    steps: int = 20

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._type = ""
        self._told: set[str] = set()
        self._open: dict[str, list[list[float]]] = {}  # step and product of clipped steps, by scale
        self._tight: dict[str, float] = {}  # scales under which the products were one number

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """What computes in which type, and whether there is a scaler; told when it becomes known, once."""
        self._facts, self._type = facts, computes_in(facts)
        keras, lightning = facts.framework == "keras", facts.framework == "lightning"
        if self._type == "float16" and not facts.loss_scaler and facts.optimizers:
            first = "wrap the optimizer: keras.optimizers.LossScaleOptimizer(optimizer)" if keras else self.fixes[0]
            first = 'use Trainer(precision="16-mixed"), which scales the loss, or "bf16-mixed"' if lightning else first
            yield from self._tell("narrow", "the model computes in float16 without a loss scaler", "a loss scaler with float16", NARROW, first)
        elif self._type == "bfloat16" and facts.loss_scaler:
            first = "use the optimizer without LossScaleOptimizer" if keras else "take the GradScaler out, or GradScaler(enabled=False)"
            yield from self._tell("wide", "a loss scaler is in use with bfloat16, which needs none", "no loss scaler with bfloat16", WIDE, first)

    def _tell(self, key: str, message: str, threshold: str, cause: str, fix: str, step: int = 0, **evidence: float) -> Iterable[Finding]:
        if key not in self._told:
            self._told.add(key)
            shown: dict[str, float | str] = {name.replace("_", " "): value for name, value in evidence.items()} or {"type": self._type}
            yield self.finding(
                step,
                message,
                where="loss scaler",
                severity=Severity.WARNING,
                evidence=shown,
                threshold=threshold,
                causes=(cause,),
                fixes=(fix,),
            )

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Collect norm after clipping times loss scale on clipped steps, for each scale; judge them by the ``steps``."""
        tracks = [next(iter(snapshot.tracks(key).values()), None) for key in ("run.gradient_norm", "run.clip_scale", "run.loss_scale")]
        norm, clip, scale = tracks
        if norm is None or clip is None or scale is None or "early" in self._told:
            return
        steps = np.intersect1d(np.intersect1d(norm.steps, clip.steps), scale.steps)
        before, share, factor = (track.values[np.isin(track.steps, steps)] for track in (norm, clip, scale))
        good = (share < CLIPPED) & (share > 0) & np.isfinite(before) & (before > 0) & np.isfinite(factor) & (factor > 2)
        full: list[tuple[int, str, list[float]]] = []
        for value in np.unique(factor[good]).tolist():
            mine = good & (factor == value)
            kept = self._open.setdefault(f"{value:g}", [])
            kept += [list(pair) for pair in zip(steps[mine].tolist(), (before * share * factor)[mine].tolist(), strict=True)]
            while len(kept) >= self.steps:
                full.append((int(kept[self.steps - 1][0]), f"{value:g}", [product for _, product in kept[: self.steps]]))
                del kept[: self.steps]
        for step, under, products in sorted(full):
            yield from self._judge(step, under, np.array(products))

    def _judge(self, step: int, scale: str, products: Vector) -> Iterable[Finding]:
        """``products`` of one scale: are they one number, and the threshold, or that of another scale?"""
        middle = median(products)
        if not np.ptp(products) <= CLOSE * middle:
            self._tight.pop(scale, None)
            return
        limit, others = self._facts.clipping, [value for other, value in self._tight.items() if other != scale]
        self._tight = {**dict(list(self._tight.items())[-SCALES:]), scale: middle}
        known = limit is not None and self._facts.clipping_by in ("norm", "") and abs(middle - limit) <= CLOSE * limit
        if known or any(abs(middle - other) <= CLOSE * other for other in others):
            told = f"the norm after clipping is {middle:.3g} only when multiplied by the loss scale ({scale})"
            numbers = {"clipped_norm_times_scale": middle, "loss_scale": float(scale)}
            yield from self._tell(
                "early", f"gradients are clipped before they are unscaled: {told}", "clipping after unscaling", EARLY, self.fixes[2], step, **numbers
            )

    def missing(self) -> str:
        """Without a narrow type there is nothing to scale."""
        return "" if self._type or self._facts.loss_scaler else "no float16, no bfloat16 and no loss scaler was seen"

    def state_dict(self) -> dict[str, Any]:
        """What was told, and the last products."""
        return {"told": sorted(self._told), "tight": dict(self._tight), "open": {key: [*kept] for key, kept in self._open.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._told = set(state["told"])
        self._tight, self._open = dict(state["tight"]), {key: [*kept] for key, kept in state["open"].items()}

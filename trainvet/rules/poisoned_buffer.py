"""NF103: a buffer that is NaN or infinite while loss and weights look healthy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.poison import WITNESSES, Sentinels, skipped_steps
from trainvet.rule import Rule
from trainvet.statistics import Facts, Snapshot

STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")


@dataclasses.dataclass
class PoisonedBuffer(Rule):
    """
    ## What it checks
    The buffers (running statistics of batch normalisation, averaged copies of weights) on sampled steps: one NaN or infinite element is enough.
    ## Why it matters
    Training in training mode does not read running statistics: loss and weights stay finite, while every evaluation and the saved model are NaN.
    Running statistics are averages, so that one NaN stays for good.
    ## What to do
    Find the batch that was not finite and keep it from the forward pass: dropping its update alone comes too late. Then reset or reload the buffer.
    ## Known limits
    Buffers that are not finite when first seen are masks. Where the weights, or the loss of the same step, are not finite either, NF101 speaks: this
    rule waits until they are fine again.
    """

    code = "NF103"
    severity = Severity.FATAL
    sees_poison = True
    reads: ClassVar[frozenset[str]] = frozenset({*WITNESSES, "run.skipped", "buffer.nonfinite", "weight.nan", "weight.inf"})
    causes = (
        "a batch with NaN or infinite values went through the forward pass",
        "an activation overflowed in a step whose update was skipped",
        "an average was taken over weights that were not finite",
    )
    fixes = (
        "skip bad batches before the forward pass: if not torch.isfinite(inputs).all(): continue",
        "reset the buffer, or load it from a checkpoint",
    )

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._sentinels = Sentinels()
        self._since: dict[str, int] = {}
        self._told: set[str] = set()
        self._good = -1

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which parameters are frozen."""
        self._facts = facts
        self._sentinels.begin(facts)
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Tell bad buffers at the first sample on which nothing else is bad."""
        weights, buffers = self._sentinels.non_finite(snapshot)
        if snapshot.column("buffer.nonfinite") is None:
            return
        self._since = {name: self._since.get(name, snapshot.step) for name in buffers}
        self._told &= set(buffers)
        fresh = [name for name in buffers if name not in self._told]
        if not buffers:
            self._good = snapshot.step
        if not fresh or weights or self._others_are_bad(snapshot):
            return
        self._told.update(fresh)
        names = self._facts.upstream_first(fresh)
        running = names[0].rpartition(".")[2] in STATISTICS
        first = min(self._since[name] for name in fresh)
        before = f" written at or before step {self._good}" if self._good >= 0 else ""
        layer = names[0].rpartition(".")[0] or "layer"
        keras = self._facts.framework == "keras"
        skip = "drop bad batches in the input pipeline: dataset.filter(lambda x, y: tf.reduce_all(tf.math.is_finite(x)))" if keras else self.fixes[0]
        reset = f"call {layer}.reset_running_stats() and train on" if running and not keras else "reset the buffer"
        yield self.finding(
            snapshot.step,
            f"{len(fresh)} buffers hold NaN or infinite values while loss and weights are finite: an evaluation is going to be NaN",
            first_step=first,
            subjects=names,
            evidence={"buffers": len(fresh), "elements": float(snapshot.values("buffer.nonfinite", tuple(fresh)).sum())},
            threshold="no NaN, no Inf",
            causes=self.causes[:2] if running else self.causes[::-1],
            fixes=(skip, f"{reset}, or load a checkpoint{before}"),
        )

    @staticmethod
    def _others_are_bad(snapshot: Snapshot) -> bool:
        """Was the loss or the gradient of this very step not finite, and did it reach the weights?"""
        if snapshot.step in skipped_steps(snapshot):
            return False
        last = [track.values[track.steps == snapshot.step] for key in WITNESSES for track in snapshot.tracks(key).values()]
        return any(not bool(np.isfinite(values).all()) for values in last)

    def state_dict(self) -> dict[str, Any]:
        """What was told, and since when buffers are bad."""
        kept = {"since": dict(self._since), "told": sorted(self._told), "good": self._good}
        return {**kept, "sentinels": self._sentinels.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._since, self._told, self._good = dict(state["since"]), set(state["told"]), int(state["good"])
        self._sentinels.load_state_dict(state["sentinels"])

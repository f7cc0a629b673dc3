"""IN102: inputs of a scale that no initialisation is made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.rule import PerSubject, Rule
from trainvet.statistics import Facts, Snapshot

NORMALISES = ("norm", "batch_norm", "embedding")


@dataclasses.dataclass
class UnscaledInput(Rule):
    """
    ## What it checks
    Floating inputs, over ``samples`` samples. Warning: whole numbers from 0 to above ``pixels`` (raw pixels or counts); a channel whose standard
    deviation is above ``spread`` (median over batches); a channel whose mean is more than ``offset`` of its standard deviations from 0, with
    values above ``spread``. Information: all deviations below 0.01, or features with one value in every batch.
    ## Why it matters
    Initial weights and learning rates are made for inputs around 0 of size 1. Larger ones saturate units, make the first updates far too large, and
    let one feature drown the others.
    ## What to do
    Divide pixels by 255; standardise each feature with the mean and deviation of the training data.
    ## Known limits
    Not judged: integers, inputs of an embedding, and models whose first layer normalises. Grey levels up to 32 pass.
    """

    code = "IN102"
    reads: ClassVar[frozenset[str]] = frozenset(
        {f"input.{key}" for key in ("min", "max", "integers", "channel_offset", "channel_std_max", "constant_features", "count")}
    )
    causes = ("the inputs are not normalised",)
    fixes = ("standardise each feature with the mean and deviation of the training data", "divide pixels by 255")

    pixels: float = 32.0
    spread: float = 10.0
    offset: float = 3.0
    samples: int = 500

    def __post_init__(self) -> None:
        self._exempt = ""
        self._integers: frozenset[str] = frozenset()
        self._kept = PerSubject(count=0.0, low=np.inf, high=-np.inf, whole=1.0, constant=np.inf, told=0.0, seen=0.0)
        self._offsets: dict[str, list[float]] = {}
        self._spreads: dict[str, list[float]] = {}

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Dtypes, and what the first layer does."""
        self._integers = frozenset(name for name, subject in facts.of("input").items() if "float" not in subject.dtype)
        depths = [layer.depth for layer in facts.layers if layer.depth >= 0 and (layer.owns or layer.kind in NORMALISES)]
        nearest = min(depths, default=-1)
        first = [layer for layer in facts.layers if nearest >= 0 and layer.depth == nearest]
        self._exempt = "the first layer normalises its input" if any(layer.kind in NORMALISES for layer in first) else ""
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Collect batches; each input is judged once, when there are enough samples."""
        column = snapshot.column("input.max")
        if column is None:
            return
        names = column[0]
        rows = self._kept.rows(names)
        value = {key: snapshot.values(f"input.{key}", names) for key in ("min", "integers", "channel_offset", "channel_std_max", "constant_features")}
        self._kept["low"][rows] = np.fmin(self._kept["low"][rows], value["min"])
        self._kept["high"][rows] = np.fmax(self._kept["high"][rows], column[1])
        self._kept["whole"][rows] = np.where(value["integers"] > 0, self._kept["whole"][rows], 0.0)
        self._kept["constant"][rows] = np.fmin(self._kept["constant"][rows], value["constant_features"])
        count = np.nan_to_num(snapshot.values("input.count", names))
        self._kept["count"][rows] += count
        for index, name in enumerate(names):
            if name not in self._integers and self._kept["told"][rows][index] == 0:
                self._offsets[name] = [*self._offsets.get(name, []), float(value["channel_offset"][index])][-50:]
                self._spreads[name] = [*self._spreads.get(name, []), float(value["channel_std_max"][index])][-50:]
        if self._exempt:
            return
        due = (self._kept["count"][rows] >= self.samples) & (self._kept["told"][rows] == 0)
        self._kept["told"][rows] = np.where(due, 1.0, self._kept["told"][rows])
        for index in np.flatnonzero(due).tolist():
            if names[index] not in self._integers:
                yield from self._judge(snapshot.step, names[index], self._kept.names.index(names[index]))

    def _judge(self, step: int, name: str, row: int) -> Iterable[Finding]:
        low, high, whole, constant, count = (float(self._kept[key][row]) for key in ("low", "high", "whole", "constant", "count"))
        offset, spread = float(np.median(self._offsets.pop(name))), float(np.median(self._spreads.pop(name)))
        evidence = {"smallest": low, "largest": high, "largest deviation": spread, "largest offset": offset, "samples": count}
        level, fix, limit = Severity.WARNING, self.fixes[0], f"a deviation of {self.spread:g}"
        if low >= 0 and high > self.pixels and whole > 0:
            what, limit = f"whole numbers from {low:g} to {high:g}, as raw pixels or counts have", f"{self.pixels:g}"
            fix = "divide the inputs by 255" if 100 < high <= 255 else f"divide the inputs by {high:g}, or standardise them"
        elif spread > self.spread:
            what = f"a channel has a standard deviation of {spread:.3g}"
        elif offset > self.offset and max(abs(low), abs(high)) > self.spread:
            what, limit = f"a channel's mean is {offset:.3g} of its standard deviations from 0", f"{self.offset:g} deviations"
        elif spread < 0.01:
            what, level = f"no channel has a standard deviation above {spread:.2g}", Severity.INFO
        elif constant > 0:
            what, level = f"{constant:g} features have one value in every batch", Severity.INFO
            fix = "leave features out that never change"
        else:
            return
        causes = self.causes if level > Severity.INFO else ("features that carry nothing, or a unit that makes them tiny",)
        yield self.finding(
            step, what, first_step=0, subjects=(name,), severity=level, evidence=evidence, threshold=limit, causes=causes, fixes=(fix, self.fixes[0])
        )

    def missing(self) -> str:
        """How many samples there were."""
        if self._exempt:
            return f"not judged: {self._exempt}"
        names = [name for name in self._kept.names if name not in self._integers]
        if self._kept.names and not names:
            return "no floating input"
        seen = max((float(self._kept["count"][self._kept.names.index(name)]) for name in names), default=0.0)
        return "" if seen >= self.samples else f"{int(seen)} of {self.samples} samples"

    def state_dict(self) -> dict[str, Any]:
        """What was collected."""
        return {"kept": self._kept.state_dict(), "offsets": dict(self._offsets), "spreads": dict(self._spreads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state["kept"])
        self._offsets = {str(name): [float(value) for value in values] for name, values in state["offsets"].items()}
        self._spreads = {str(name): [float(value) for value in values] for name, values in state["spreads"].items()}

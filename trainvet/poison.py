"""What other rules may still look at once a value is no longer finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainvet.statistics import Facts, Snapshot, Track

WITNESSES = ("loss.value", "run.gradient_norm")


class Poison:
    """Keeps rules away from data after the first non-finite value.

    A NaN activation is not dead and a NaN loss is not rising. From the first non-finite loss, gradient norm (of a step that was
    applied), weight or buffer on, snapshots are withheld until a sampled snapshot shows finite weights and buffers again.
    A step that was skipped leaves no poison behind; its non-finite rows are left out of the series.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        self._sentinels = Sentinels()

    def begin(self, facts: Facts) -> None:
        """The plan, at the start and whenever it changes."""
        self._sentinels.begin(facts)

    def clean(self, snapshot: Snapshot) -> Snapshot | None:
        """The part of ``snapshot`` from before the poison; None where nothing is left."""
        weights, buffers = self._sentinels.non_finite(snapshot)
        skipped = skipped_steps(snapshot)
        bad = [step for step in bad_steps(snapshot) if step not in skipped]
        if weights or buffers:
            bad.append(snapshot.step)
        if self.since is not None:
            if bad or not snapshot.sampled:
                return None
            self.since = None
        if bad:
            self.since = min(bad)
        if self.since is None and not skipped:
            return snapshot
        cut = snapshot.step + 1 if self.since is None else self.since
        series = {}
        for key, tracks in snapshot.series.items():
            kept = {name: _select(track, cut, key in WITNESSES) for name, track in tracks.items()}
            series[key] = {name: track for name, track in kept.items() if len(track.steps)}
        tables = snapshot.tables if self.since is None and snapshot.step not in skipped else {}
        return dataclasses.replace(snapshot, tables=tables, series=series)


class Sentinels:
    """Tells masks from poison: a buffer or a frozen parameter that is non-finite when first seen was meant to be (a mask of -inf)."""

    def __init__(self) -> None:
        self._frozen: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        self._exempt: set[str] = set()
        self._names: dict[str, tuple[str, ...]] = {}

    def begin(self, facts: Facts) -> None:
        """Read from the plan which parameters are frozen."""
        self._frozen = frozenset(name for name, subject in facts.parameters.items() if not subject.trainable)

    def non_finite(self, snapshot: Snapshot) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the weights and of the buffers that hold a non-finite element and are no sentinels. To be called with every snapshot."""
        weights, buffers = counts(snapshot, "weight.nan", "weight.inf"), counts(snapshot, "buffer.nonfinite")
        for name in [*(name for name in weights if name in self._frozen), *buffers]:
            if name not in self._seen:
                self._exempt.add(name)
        for target in ("weight", "buffer"):
            names = snapshot.tables[target].names if target in snapshot.tables else ()
            if names and names != self._names.get(target):
                self._names[target] = names
                self._seen.update(names)
        return tuple(name for name in weights if name not in self._exempt), tuple(name for name in buffers if name not in self._exempt)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists."""
        return {"seen": sorted(self._seen), "exempt": sorted(self._exempt)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._seen, self._exempt = set(state["seen"]), set(state["exempt"])


def counts(snapshot: Snapshot, *keys: str) -> dict[str, float]:
    """The sum of some sampled counts for the subjects where it is not 0; empty where none of them was measured."""
    total: dict[str, float] = {}
    for key in keys:
        column = snapshot.column(key)
        if column is not None:
            for index in np.flatnonzero(column[1]).tolist():
                total[column[0][index]] = total.get(column[0][index], 0.0) + float(column[1][index])
    return total


def bad_steps(snapshot: Snapshot) -> list[int]:
    """Steps at which the loss or the total gradient norm was not finite."""
    return [int(step) for key in WITNESSES for track in snapshot.tracks(key).values() for step in track.steps[~np.isfinite(track.values)]]


def skipped_steps(snapshot: Snapshot) -> frozenset[int]:
    """Steps whose update was skipped."""
    return frozenset(int(step) for track in snapshot.tracks("run.skipped").values() for step in track.steps[track.values > 0])


def _bad(total: Mapping[str, float], exempt: set[str]) -> list[str]:
    return [name for name, count in total.items() if count != 0 and name not in exempt]


def _select(track: Track, cut: int, finite_only: bool) -> Track:
    keep = track.steps < cut
    if finite_only:
        keep &= np.isfinite(track.values)
    return Track(track.steps[keep], track.applied[keep], track.values[keep])

"""What other rules may still look at once a value is no longer finite."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainvet.statistics import Snapshot, Track

WITNESSES = ("loss.value", "run.gradient_norm")


class Poison:
    """Keeps rules away from data after the first non-finite value.

    A NaN activation is not dead and a NaN loss is not rising. From the first non-finite loss, gradient norm (of a step that was
    applied), weight or buffer on, snapshots are withheld until a sampled snapshot shows finite weights and buffers again.
    A step that was skipped leaves no poison behind; its non-finite rows are left out of the series.
    """

    def __init__(self) -> None:
        self.since: int | None = None

    def clean(self, snapshot: Snapshot) -> Snapshot | None:
        """The part of ``snapshot`` from before the poison; None where nothing is left."""
        stale = self.since is not None
        if stale and snapshot.tables and not state_is_bad(snapshot) and not bad_steps(snapshot):
            self.since, stale = None, False
        if stale:
            return None
        skipped = skipped_steps(snapshot)
        bad = [step for step in bad_steps(snapshot) if step not in skipped]
        if state_is_bad(snapshot):
            bad.append(snapshot.step)
        if bad:
            self.since = min(bad)
        cut = snapshot.step + 1 if self.since is None else self.since
        if self.since is None and not skipped:
            return snapshot
        series = {}
        for key, tracks in snapshot.series.items():
            kept = {name: _select(track, cut, key in WITNESSES) for name, track in tracks.items()}
            series[key] = {name: track for name, track in kept.items() if len(track.steps)}
        tables = snapshot.tables if self.since is None and snapshot.step not in skipped else {}
        return dataclasses.replace(snapshot, tables=tables, series=series)


def state_is_bad(snapshot: Snapshot) -> bool:
    """Does a weight or buffer hold a non-finite element?"""
    for key in ("weight.nan", "weight.inf", "buffer.nonfinite"):
        column = snapshot.column(key)
        if column is not None and bool(np.any(column[1] > 0)):
            return True
    return False


def bad_steps(snapshot: Snapshot) -> list[int]:
    """Steps at which the loss or the total gradient norm was not finite."""
    return [
        int(step)
        for key in WITNESSES
        for track in snapshot.tracks(key).values()
        for step in track.steps[~np.isfinite(track.values)]
    ]


def skipped_steps(snapshot: Snapshot) -> frozenset[int]:
    """Steps whose update was skipped."""
    return frozenset(int(step) for track in snapshot.tracks("run.skipped").values() for step in track.steps[track.values > 0])


def _select(track: Track, cut: int, finite_only: bool) -> Track:
    keep = track.steps < cut
    if finite_only:
        keep &= np.isfinite(track.values)
    return Track(track.steps[keep], track.applied[keep], track.values[keep])

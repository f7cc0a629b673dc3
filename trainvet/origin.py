"""Where a non-finite value was born, as far as the numbers of one snapshot show."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from trainvet.finding import Evidence
from trainvet.poison import counts
from trainvet.statistics import Facts, Snapshot


@dataclasses.dataclass(frozen=True)
class Origin:
    """``kind`` is "input", "weight", "activation", "buffer", "loss", "gradient" or "norm"; ``subjects`` the tensors; ``told`` what is known."""

    kind: str
    subjects: tuple[str, ...]
    told: str


def at(snapshot: Snapshot, step: int) -> Snapshot:
    """What is known of ``step``: tables speak for the snapshot's last step; of an earlier step they show the aftermath."""
    return snapshot if step == snapshot.step else dataclasses.replace(snapshot, tables={})


def not_finite(snapshot: Snapshot, key: str) -> dict[int, tuple[str, ...]]:
    """The steps at which a series of ``key`` is not finite, each with the names of the series that are so there."""
    bad: dict[int, tuple[str, ...]] = {}
    for name, track in snapshot.tracks(key).items():
        for step in track.steps[~np.isfinite(track.values)].tolist():
            bad[step] = (*bad.get(step, ()), name)
    return bad


def value_at(snapshot: Snapshot, key: str, step: int, name: str | None = None) -> float | None:
    """A series' value at a step; of the first series that has one where no name is given; None where it was not measured."""
    for label, track in snapshot.tracks(key).items():
        if name in (None, label) and step in track.steps:
            return float(track.values[track.steps == step][0])
    return None


def find(
    here: Snapshot,
    facts: Facts,
    step: int,
    *,
    losses: Sequence[str] = (),
    weights: Sequence[str] = (),
    buffers: Sequence[str] = (),
    harmless: Collection[str] = (),
) -> Origin:
    """The most upstream place that the evidence allows.

    ``losses`` are the losses that are bad at ``step``, ``weights`` and ``buffers`` those that are bad in the tables, ``harmless`` the inputs
    and activations that held NaN before without any harm. In forward order the first bad activation is the place.
    """
    inputs = {name: count for name, count in counts(here, "input.nan", "input.inf").items() if name not in harmless}
    if inputs:
        return Origin("input", tuple(inputs), f"the batch itself was not finite, before any computation ({sum(inputs.values()):g} of its elements)")
    measured = _names(here, "gradient")
    gradients, parameters = counts(here, "gradient.nan", "gradient.inf"), facts.parameters
    # an update with a bad gradient makes the weight bad too; a weight whose gradient is finite was bad before, or its optimizer made it so
    own = [name for name in weights if (name in measured and name not in gradients) or (name in parameters and not parameters[name].trainable)]
    if here.urgent and len(weights) < len(_names(here, "weight")):  # looked at before the update, which would have reached them all
        own = list(weights)
    if own:
        return Origin("weight", facts.upstream_first(own), "weights are not finite, and no gradient made them so")
    nan = facts.upstream_first(name for name in counts(here, "activation.nan") if name not in harmless)
    if nan:
        return Origin("activation", nan[:1], f"the first NaN of the forward pass is in the output of {nan[0]}")
    if buffers:
        return Origin("buffer", facts.upstream_first(buffers), "buffers are not finite")
    if losses:
        after = "; every measured activation is free of NaN, so it was born after them" if here.column("activation.nan") else ""
        return Origin("loss", tuple(losses), f"the loss is not finite{after}")
    return _backward(here, facts, step, weights)


def _backward(here: Snapshot, facts: Facts, step: int, weights: Sequence[str]) -> Origin:
    """The backward pass spreads a NaN from the output towards the input: the place is the bad gradient nearest the output."""
    measured, bad = _names(here, "gradient"), facts.upstream_first(counts(here, "gradient.nan", "gradient.inf"))
    if bad:
        return Origin("gradient", bad[-1:], f"{len(bad)} of {len(measured)} gradients are not finite; nearest the output is that of {bad[-1]}")
    norm = value_at(here, "run.gradient_norm", step)
    if norm is not None and np.isnan(norm):
        return Origin("gradient", ("gradients",), "the gradient norm is NaN although the loss is finite")
    if norm is not None and np.isinf(norm):
        what = "although every element is finite" if measured else "or elements are infinite"
        return Origin("norm", ("gradients",), f"norm overflowed float32 {what}: a norm above 1e19 cannot be squared")
    return Origin("weight", facts.upstream_first(weights), "weights are not finite")


def evidence(here: Snapshot, step: int, losses: Sequence[str], weights: Sequence[str], buffers: Sequence[str]) -> dict[str, Evidence]:
    """The numbers at hand: loss and gradient norm at ``step``, and how much of each kind is not finite in the tables."""
    shown: dict[str, Evidence] = {}
    for name in losses or tuple(here.tracks("loss.value"))[:1]:
        value = value_at(here, "loss.value", step, name)
        if value is not None:
            shown[name] = value
    norm = value_at(here, "run.gradient_norm", step)
    if norm is not None:
        shown["gradient norm"] = norm
    for label, keys in (("gradients", ("gradient.nan", "gradient.inf")), ("activations with NaN", ("activation.nan",))):
        found = counts(here, *keys)
        if found:
            shown[label] = f"{len(found)} of {len(_names(here, keys[0].split('.')[0]))}"
    for label, keys in (("input elements", ("input.nan", "input.inf")), ("label elements", ("label.nan", "label.inf"))):
        total = sum(counts(here, *keys).values())
        if total:
            shown[label] = int(total)
    return shown | {label: len(names) for label, names in (("weights", weights), ("buffers", buffers)) if names}


def _names(snapshot: Snapshot, target: str) -> tuple[str, ...]:
    """The subjects whose non-finite elements were counted."""
    column = snapshot.column(f"{target}.nan")
    return () if column is None else column[0]

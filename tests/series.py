"""Written runs: a short notation for series, and a rule driven over them while the laws that hold for every rule are checked.

``series("1 x5, 2..1 x10, _ x3, nan")``: a value, ``xN`` repeats it, ``a..b xN`` is a straight line, ``_`` is a step without a row.
Steps count from 0. In ``tracks`` a statistic has one series or one per subject, in ``columns`` one per subject; the samples of columns lie at the
steps ``at`` (default 0, 1, 2, …), or at the same rows as the tracks.

    assert run(Rule(), {"loss.value": "1 x40, 3 x40"}) == [(79, "LO101")]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainvet.finding import Finding
from trainvet.rule import Rule
from trainvet.statistics import Facts, Optimizer, Snapshot, Subject, Table, Track

Written = Any  # str, a sequence of numbers, or {step: number}
SUBJECT = {"loss.value": "loss", "optimizer.learning_rate": "group 0"}


def series(text: str) -> dict[int, float]:
    """{step: value} of a written series."""
    values: list[float | None] = []
    for item in text.split(","):
        value, _, count = item.strip().partition(" x")
        first, _, last = value.partition("..")
        times = int(count or 1)
        values += [None] * times if value == "_" else np.linspace(float(first), float(last), times).tolist() if last else [float(first)] * times
    return {step: value for step, value in enumerate(values) if value is not None}


def rows(written: Written) -> dict[int, float]:
    """{step: value} of anything a test writes."""
    if isinstance(written, str):
        return series(written)
    return dict(written) if isinstance(written, Mapping) else dict(enumerate(np.asarray(written, dtype=float).tolist()))


def snapshots(
    tracks: Mapping[str, Written] | None = None,
    columns: Mapping[str, Mapping[str, Written]] | None = None,
    at: Sequence[int] | None = None,
    block: int = 7,
    samples: int = 0,
) -> list[Snapshot]:
    """A run as snapshots: one at each sampled step and one wherever ``block`` rows have gathered. ``samples``: batches per epoch (0: one epoch)."""
    sampled = {key: {name: list(rows(item).values()) for name, item in table.items()} for key, table in (columns or {}).items()}
    count = max((len(item) for table in sampled.values() for item in table.values()), default=0)
    at = list(at if at is not None else range(count))[:count]
    sample = {step: index for index, step in enumerate(at)}
    lines = {
        key: {
            name: rows(item)
            for name, item in (many if isinstance(many, Mapping) and not _numbered(many) else {SUBJECT.get(key, "run"): many}).items()
        }
        for key, many in (tracks or {}).items()
    }
    length = max([*(max(line, default=-1) + 1 for many in lines.values() for line in many.values()), *(step + 1 for step in at)], default=0)
    skipped = next(iter(lines.get("run.skipped", {}).values()), {})
    applied = np.cumsum([skipped.get(step, 0.0) <= 0 for step in range(length)]).tolist()
    out, start = [], 0
    for step in range(length):
        if step in sample or step - start + 1 >= block or step == length - 1:
            span = range(start, step + 1)
            held = {
                key: {name: _track(line, span, applied) for name, line in many.items() if any(s in line for s in span)} for key, many in lines.items()
            }
            epoch, batch = divmod(step, samples) if samples else (0, step)
            tables = _tables(sampled, sample[step]) if step in sample else {}
            out.append(Snapshot(step, applied[step], batch, epoch, tables, {key: many for key, many in held.items() if many}))
            start = step + 1
    return out


def _numbered(many: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, int) for key in many)


def _track(line: Mapping[int, float], span: range, applied: Sequence[int]) -> Track:
    steps = [step for step in span if step in line]
    return Track(np.array(steps), np.array([applied[step] for step in steps]), np.array([line[step] for step in steps], dtype=np.float64))


def _tables(sampled: Mapping[str, Mapping[str, list[float]]], index: int) -> dict[str, Table]:
    found: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    for key, table in sampled.items():
        names = tuple(name for name, item in table.items() if index < len(item))
        found.setdefault(key.split(".")[0], (names, {}))[1][key.split(".", 1)[1]] = np.array([table[name][index] for name in names])
    return {target: Table(names, columns) for target, (names, columns) in found.items() if names}


def drive(rule: Rule, run: Iterable[Snapshot], facts: Facts | None = None) -> list[Finding]:
    """What ``rule`` finds in a run; a snapshot without anything the rule reads is not shown to it, as in the monitor."""
    found = list(rule.begin(facts or Facts()))
    for snapshot in run:
        if rule.reads & frozenset(snapshot.keys()):
            found += rule.check(snapshot)
    return found


def findings(
    rule: Rule,
    tracks: Mapping[str, Written] | None = None,
    columns: Mapping[str, Mapping[str, Written]] | None = None,
    facts: Facts | None = None,
    at: Sequence[int] | None = None,
    **how: Any,
) -> list[Finding]:
    """What ``rule`` finds, after the laws were checked: blocks of any size, a resumed rule and a longer run all give the same findings."""
    whole = snapshots(tracks, columns, at, **how)
    found = drive(fresh(rule), whole, facts)
    for block in (1, 23) if tracks and "block" not in how else ():
        other = drive(fresh(rule), snapshots(tracks, columns, at, block=block, **how), facts)
        assert plain(other) == plain(found), f"blocks of {block} rows give other findings"
    half = len(whole) // 2
    first, second = fresh(rule), fresh(rule)
    early = drive(first, whole[:half], facts)
    cut = whole[half - 1].step if half else -1
    assert plain([item for item in found if item.step <= cut or not rule.reads]) == plain(early), "what follows changes what was found before"
    list(second.begin(facts or Facts()))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    late = [finding for snapshot in whole[half:] if rule.reads & frozenset(snapshot.keys()) for finding in second.check(snapshot)]
    assert plain(early + late) == plain(found), "a rule restored from its state gives other findings"
    for finding in found:
        well_worded(finding)
    return found


def plain(found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings in a form in which NaN equals NaN."""
    return [finding.to_dict() for finding in found]


def run(rule: Rule, *args: Any, **how: Any) -> list[tuple[int, str]]:
    """(step, code) of what ``findings`` finds."""
    return [(finding.step, finding.code) for finding in findings(rule, *args, **how)]


def fresh(rule: Rule) -> Rule:
    """A rule with the same settings and no history."""
    return dataclasses.replace(rule)


def well_worded(finding: Finding) -> None:
    """Messages, causes and fixes start lower case (a name or acronym may not) and have no full stop; evidence is plain and there is a next step."""
    for text in (finding.message, *finding.causes, *finding.fixes, finding.threshold):
        assert text == text.strip(), text
        assert not text.endswith("."), text
        assert not text[:1].isupper() or text[1:2].isupper() or text.split()[0] in NAMES, text
    assert finding.message
    assert finding.threshold, "a finding states the limit it crossed"
    assert finding.causes, "a finding names likely causes"
    assert finding.fixes, "a finding says what to try"
    assert all(isinstance(value, float | int | str) for value in finding.evidence.values())
    assert finding.first_step <= finding.step
    json.dumps(finding.to_dict())


NAMES = {"Adam", "AdamW", "Keras", "Lightning", "PyTorch"}


def parameters(shapes: Mapping[str, tuple[int, ...]], **changes: Mapping[str, Any]) -> Iterator[Subject]:
    """Parameters in forward order, all in "group 0"; ``changes`` maps a field to {name: value}."""
    for depth, (name, shape) in enumerate(shapes.items()):
        subject = Subject(name, "parameter", module=name.rpartition(".")[0], depth=depth, shape=shape, group="group 0")
        yield dataclasses.replace(subject, **{field: values[name] for field, values in changes.items() if name in values})


def plan(
    shapes: Mapping[str, tuple[int, ...]], changes: Mapping[str, Mapping[str, Any]] | None = None, optimizer: Optimizer | None = None, **facts: Any
) -> Facts:
    """Facts of a run whose optimizer (default: Adam, epsilon 1e-8) holds all ``shapes``."""
    held = optimizer or Optimizer("optimizer 0", "Adam", "adam", 1e-8, groups=("group 0",), betas=(0.9, 0.999))
    held = dataclasses.replace(held, parameters=held.parameters or tuple(shapes))
    return Facts(framework="none", subjects=tuple(parameters(shapes, **(changes or {}))), optimizers=(held,), **facts)

"""Recorded runs: where they lie, and what their files say together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainvet.finding import Finding
from trainvet.integrations.jsonl import FILE, latest, read_lines
from trainvet.integrations.tensorboard.reader import event_files, find_runs, holds_run, read
from trainvet.report import Report


def run_below(root: Path) -> Path:
    """``root`` itself, or the only directory below it that holds a run. Raises ValueError where there is none or more than one."""

    def is_run(directory: Path) -> bool:
        return (directory / FILE).is_file() or holds_run(directory)

    if not root.is_dir():
        raise ValueError(f"{root} is not a directory" if root.exists() else f"{root} does not exist")
    if is_run(root):
        return root
    runs = find_runs(root, is_run)
    if not runs:
        raise ValueError(f"no run of trainvet in {root} or below it")
    if len(runs) > 1:
        listed = "".join(f"\n  {run}" for run in runs[:20]) + (f"\n  and {len(runs) - 20} more" if len(runs) > 20 else "")
        raise ValueError(f"{len(runs)} runs of trainvet below {root}; name one of them:{listed}")
    return runs[0]


def recorded_report(directory: Path) -> tuple[Report, list[str]]:
    """The run's own report, and notes on what could not be read; for a run without an end record its findings so far, with the status
    "no end record". Raises ValueError where nothing of a run can be read, and OSError."""
    start: dict[str, Any] | None = None
    findings: list[Finding] = []
    notes: list[str] = []
    if (directory / FILE).is_file():
        start, findings, end, notes = read_lines(directory / FILE)
        if end is not None:
            return end, notes
    if not event_files(directory):
        return latest(start, findings), notes
    recording = read(directory)
    notes += recording.notes
    if recording.end is not None and (start is None or start["step"] == recording.start):
        return recording.end, notes
    start = start or {"environment": recording.environment}
    report = latest(start, findings or list(recording.findings))
    last = recording.snapshots[-1] if recording.snapshots else None
    return (dataclasses.replace(report, steps=last.step + 1, applied=last.applied) if last else report), notes

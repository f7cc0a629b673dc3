"""Event files of a trainvet directory back to environment, facts, snapshots and findings.

What is read is untrusted: it is parsed, checked against its schema and size-limited, never executed. What does not fit is left out and
said in the recording's notes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2

from trainvet.finding import Finding
from trainvet.integrations.tensorboard import values
from trainvet.integrations.tensorboard.event_file import MARK, DamagedError, records
from trainvet.integrations.tensorboard.journal import END, ENVIRONMENT, FACTS, FINDINGS, SCHEMA, SERIES, SNAPSHOT, STATS
from trainvet.integrations.tensorboard.layout import VERSION, Layout, read_meta
from trainvet.recording import Recording, facts_from_dict
from trainvet.report import Report
from trainvet.statistics import Facts, Snapshot

T = TypeVar("T")
MOST_BYTES = 4 << 30
MOST_DIRECTORIES = 20_000
PEEKED = 8
_STREAMS = {SCHEMA, ENVIRONMENT, FACTS, STATS, SERIES, SNAPSHOT, FINDINGS, END}
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError)


def event_files(directory: Path) -> list[Path]:
    """The event files directly in ``directory``, oldest first."""
    return sorted(path for path in directory.iterdir() if MARK in path.name and path.is_file())


def holds_run(directory: Path) -> bool:
    """Do event files of trainvet lie directly in ``directory``? Looks at the first records of each."""
    for path in event_files(directory):
        try:
            for index, data in enumerate(records(path)):
                if any(value.tag in _STREAMS for value in _values(_event(data))):
                    return True
                if index == PEEKED:
                    break
        except (ValueError, OSError):
            continue
    return False


def find_runs(root: Path, is_run: Callable[[Path], bool] = holds_run) -> list[Path]:
    """Directories at or below ``root`` that hold a run of trainvet (links are not followed). Raises ValueError for a tree that is too large."""
    found = []
    for count, (directory, below, _) in enumerate(os.walk(root)):
        if count > MOST_DIRECTORIES:
            raise ValueError(f"{root} holds more than {MOST_DIRECTORIES:,} directories; name one run")
        below.sort()
        if is_run(Path(directory)):
            found.append(Path(directory))
    return found


class _Run:
    """Takes events in order; a START event makes what older files say from its step on superseded."""

    def __init__(self) -> None:
        self.environment: dict[str, Any] = {}
        self.moments: list[tuple[int, Facts] | Snapshot] = []
        self.findings: dict[str, Finding] = {}
        self.end: Report | None = None
        self.start = self.thinned = self.dropped = 0
        self.latest = -1
        self._dropped = 0
        self.notes: list[str] = []
        self.layouts: dict[int, Layout] = {}

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 20:
            self.notes.append(text)

    def begin(self, step: int) -> None:
        self.start, self.end = step, None
        self.moments = [moment for moment in self.moments if _step(moment) < step]
        self.findings = {key: finding for key, finding in self.findings.items() if finding.step < step}
        self.latest = max((moment.step for moment in self.moments if isinstance(moment, Snapshot)), default=-1)
        if self.latest < 0:
            self.thinned = self.dropped = self._dropped = 0

    def take(self, event: Any) -> None:
        found = {value.tag: value for value in _values(event) if value.tag in _STREAMS}
        if ENVIRONMENT in found:
            environment = _json(found[ENVIRONMENT])
            self.environment = environment if isinstance(environment, dict) else {}
        if FACTS in found:
            data = _json(found[FACTS])
            if data["v"] != VERSION:
                raise ValueError(f"format version {data['v']!r} is not known here ({VERSION} is)")
            facts = facts_from_dict(data["facts"])
            if not (data.get("repeated") and any(not isinstance(moment, Snapshot) for moment in self.moments)):
                self.moments.append((int(data["step"]), facts))
        if SCHEMA in found:
            layout = Layout.from_dict(_json(found[SCHEMA]))
            self.layouts[layout.generation] = layout
        if SNAPSHOT in found:
            self._snapshot(found)
        if FINDINGS in found:
            for text in values.read_strings(found[FINDINGS]):
                self.findings.setdefault(text, Finding.from_dict(json.loads(text)))
        if END in found:
            self.end = Report.from_dict(_json(found[END])["report"])

    def _snapshot(self, found: dict[str, Any]) -> None:
        snapshot, numbers = read_meta(values.read_array(found[SNAPSHOT]))
        late = f"step {snapshot.step} comes after step {self.latest}"
        if snapshot.step < self.latest:
            raise ValueError(late)
        arrays = {tag: values.read_array(found[tag]) for tag in (STATS, SERIES) if tag in found}
        if arrays:
            layout = self.layouts.get(numbers["generation"])
            if layout is None:
                raise ValueError(f"the schema of step {snapshot.step} is missing")
            snapshot = layout.unpack(snapshot, arrays.get(STATS), arrays.get(SERIES))
        if snapshot.step == self.latest and not (snapshot.aside or (numbers["sampled"] and not arrays)):
            raise ValueError(late)
        self.latest = snapshot.step
        self.moments.append(snapshot)
        self.thinned += numbers["sampled"] == 1 and STATS not in found
        more = numbers["dropped"] - self._dropped  # counted by each process from 0
        self.dropped, self._dropped = self.dropped + (more if more >= 0 else numbers["dropped"]), numbers["dropped"]


def read(directory: Path) -> Recording:
    """The latest run in ``directory``: resumed parts are joined, superseded steps left out.

    Raises ValueError where there is no event file of trainvet, and OSError.
    """
    files = event_files(directory)
    if not files:
        raise ValueError(f"{directory} holds no event file")
    if sum(path.stat().st_size for path in files) > MOST_BYTES:
        raise ValueError(f"the event files in {directory} are larger than {MOST_BYTES >> 30} GiB together")
    run = _Run()
    for path in files:
        try:
            for data in records(path):
                event = _event(data)
                if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
                    run.begin(int(event.step))
                    continue
                try:
                    run.take(event)
                except _WRONG as error:
                    why = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
                    run.note(f"{path.name}, step {event.step}: {why}")
        except DamagedError as error:
            run.note(f"{error}; what follows in this file was not read")
    known = {field.name for field in dataclasses.fields(Recording)}
    recording = Recording(
        **{name: value for name, value in vars(run).items() if name in known and name not in ("moments", "findings", "notes")},
        moments=tuple(run.moments),
        findings=tuple(run.findings.values()),
        notes=tuple(run.notes),
    )
    if not recording.moments and not recording.environment and recording.end is None and not recording.findings:
        raise ValueError(f"{directory} holds no event file of trainvet" + (f" ({run.notes[0]})" if run.notes else ""))
    return recording


def _step(moment: tuple[int, Facts] | Snapshot) -> int:
    return moment.step if isinstance(moment, Snapshot) else moment[0]


def _event(data: bytes) -> Any:
    try:
        return event_pb2.Event.FromString(data)
    except DecodeError:
        raise DamagedError("a record is not an Event") from None


def _values(event: Any) -> Iterator[Any]:
    return iter(event.summary.value) if event.HasField("summary") else iter(())


def _json(value: Any) -> Any:
    texts = values.read_strings(value)
    if len(texts) != 1:
        raise ValueError(f"{value.tag}: one text was expected, found {len(texts)}")
    return json.loads(texts[0])

"""A run as JSON lines in ``trainvet.jsonl``: a start record, one record per finding, and the whole report at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainvet.cause import order
from trainvet.finding import Finding
from trainvet.integrations.append import append, open_append
from trainvet.recording import jsonable
from trainvet.report import Report
from trainvet.statistics import Facts, Snapshot

FILE = "trainvet.jsonl"
VERSION = 1
LONGEST_LINE = 64 << 20
WAITING = 1000
log = logging.getLogger("trainvet")


class JsonLinesSink:
    """Appends to ``<log_dir>/trainvet.jsonl``; each line is written whole, at once and in strict JSON (no NaN).

    On a full disk the lines wait in memory (at most 1,000) and are tried again with the next record; one warning is logged. Another
    process than the one that started the sink (a fork), a copy and an unpickled sink write nothing. A file that cannot be opened raises
    OSError from :meth:`start`.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = Path(log_dir) / FILE
        self._pid = 0
        self._fd: int | None = None
        self._closed = self._warned = self._ended = False
        self._waiting: list[tuple[bytes, bool]] = []

    def start(self, step: int, environment: Mapping[str, Any]) -> None:
        """Open the file and write the start record."""
        if self._closed or self._fd is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd, self._pid = open_append(self.path), os.getpid()
        if _ends_inside_a_line(self.path):
            self._waiting.append((b"\n", False))
        self._record({"record": "start", "v": VERSION, "time": time.time(), "step": step, "environment": environment})

    def facts(self, step: int, facts: Facts) -> None:
        """Facts are in the event files."""

    def write(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        """One record per finding."""
        for finding in findings:
            self._record({"record": "finding", "time": time.time(), **finding.to_dict()}, durable=finding.severity >= 30)

    def report(self, step: int, report: Report) -> None:
        """The report of a run that has ended; before that, findings speak for themselves."""
        if report.status != "running" and not self._ended:
            self._ended = True
            self._record({"record": "end", "time": time.time(), **report.to_dict()}, durable=True)

    def close(self) -> None:
        """Close the file."""
        self._flush()
        if self._fd is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd, self._closed = None, True

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["path"].parent)  # type: ignore[misc]
        self._closed = True

    def _record(self, record: Mapping[str, Any], durable: bool = False) -> None:
        if self._closed or self._fd is None or self._pid != os.getpid():
            return
        line = json.dumps(jsonable(record, depth=200), allow_nan=False).encode("ascii") + b"\n"
        self._waiting.append((line, durable))
        del self._waiting[:-WAITING]
        self._flush()

    def _flush(self) -> None:
        if self._fd is None or self._pid != os.getpid():
            return
        try:
            while self._waiting:
                line, durable = self._waiting[0]
                append(self._fd, line)
                del self._waiting[0]
                if durable:
                    os.fsync(self._fd)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("trainvet: %s cannot be written (%s); training goes on", self.path, error.strerror or error)


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_lines(path: Path) -> tuple[dict[str, Any] | None, list[Finding], Report | None, list[str]]:
    """The latest run in the file: its start record, findings in the order they were told, the report at its end, and notes.

    A resumed run keeps what was found before the step it resumed at; a run that started again at step 0 replaces the earlier one. The
    report is None for a run that was killed or still goes on. Lines that are damaged are counted in a note. Raises OSError and, for a
    file that holds no record, ValueError.
    """
    start: dict[str, Any] | None = None
    findings: list[Finding] = []
    end: Report | None = None
    damaged = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            if not line.strip():
                continue
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError("line too long")
                record = json.loads(line, parse_constant=_refuse)
                kind = record["record"]
                if kind == "start":
                    step = int(record["step"])
                    start, end = record, None
                    findings = [finding for finding in findings if finding.step < step]
                elif kind == "finding":
                    findings.append(Finding.from_dict(record))
                elif kind == "end":
                    end = Report.from_dict(record)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                damaged += 1
    if start is None and not findings and end is None:
        raise ValueError(f"{path} holds no record of trainvet")
    notes = [f"{damaged} damaged lines in {path.name} were left out"] if damaged else []
    return start, findings, end, notes


def latest(start: Mapping[str, Any] | None, findings: Sequence[Finding]) -> Report:
    """What is known of a run without an end record: its findings in causal order; nothing about what was checked."""
    environment = (start or {}).get("environment")
    return Report(
        findings=tuple(order(findings)),
        status="no end record",
        reason="the run was killed or is still going",
        environment=environment if isinstance(environment, dict) else {},
    )


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")

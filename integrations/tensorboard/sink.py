"""The run as TensorBoard shows it: event files in one directory, written by a thread of our own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainvet.finding import Finding
from trainvet.integrations.tensorboard.journal import Journal
from trainvet.integrations.tensorboard.writer import LIMIT, PATIENCE, Background
from trainvet.report import Report
from trainvet.statistics import Facts, Snapshot

log = logging.getLogger("trainvet")


class TensorBoardSink:
    """Writes event files into ``log_dir``, which should be a directory of its own (``<run>/trainvet``): of two files that grow in one
    directory TensorBoard reads only the newer.

    What is handed over waits in a queue of at most 256 entries; when it is full the oldest snapshot without a finding is dropped and
    counted. ``backoff`` is the time in seconds before a failed write is tried again, in a new file. :meth:`start` raises OSError where no
    file can be made. In a forked process, as a copy or unpickled, the sink writes nothing.
    """

    def __init__(self, log_dir: Path, *, limit: int = LIMIT, backoff: float = 30.0) -> None:
        self.log_dir = Path(log_dir)
        self._limit, self._backoff = limit, backoff
        self._journal: Journal | None = None
        self._writer: Background | None = None
        self._held: tuple[Snapshot, tuple[Finding, ...], float] | None = None
        self._closed = False

    def start(self, step: int, environment: Mapping[str, Any]) -> None:
        """Open the first file."""
        if self._closed or self._journal is not None:
            return
        journal = Journal(self.log_dir, self._backoff)
        journal.start(step, dict(environment), time.time())
        self._journal = journal
        self._writer = Background(self._limit, on_fork=journal.abandon)
        journal.queue = self._writer

    def facts(self, step: int, facts: Facts) -> None:
        """The plan, with the predicted learning rates."""
        self._release()
        if self._journal is not None:
            self._submit(partial(self._journal.facts, step, facts, time.time()))

    def write(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        """A snapshot; with findings it waits for the report that follows, so that one Event holds both."""
        self._release()
        if findings:
            self._held = (snapshot, tuple(findings), time.time())
        elif self._journal is not None:
            self._submit(partial(self._journal.write, snapshot.step, snapshot, (), None, time.time()), droppable=True)

    def report(self, step: int, report: Report) -> None:
        """The report as it stands."""
        if self._held is not None and self._held[0].step == step and report.status == "running":
            self._release(report)
            return
        self._release()
        if self._journal is not None:
            self._submit(partial(self._journal.report, step, report, time.time()))

    def close(self) -> None:
        """Write what waits, for at most 5 seconds, and close the file."""
        if self._closed:
            return
        self._release()
        self._closed = True
        if self._journal is None or self._writer is None:
            return
        self._submit(self._journal.close)
        if not self._writer.close(PATIENCE):
            log.warning("trainvet: %s: the disk did not take everything within %g s", self.log_dir, PATIENCE)

    def __getstate__(self) -> dict[str, Any]:
        return {"log_dir": self.log_dir, "limit": self._limit, "backoff": self._backoff}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["log_dir"], limit=state["limit"], backoff=state["backoff"])  # type: ignore[misc]
        self._closed = True

    def _release(self, report: Report | None = None) -> None:
        held, self._held = self._held, None
        if held is not None and self._journal is not None:
            snapshot, findings, now = held
            self._submit(partial(self._journal.write, snapshot.step, snapshot, findings, report, now))

    def _submit(self, call: Any, droppable: bool = False) -> None:
        if self._writer is not None:
            self._writer.submit(call, droppable)

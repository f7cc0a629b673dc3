"""What is written to the event files of one run, in what order, and what happens when the disk is full. Called from one thread only."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainvet.finding import Finding, Severity
from trainvet.integrations.tensorboard import layout as layouts
from trainvet.integrations.tensorboard import scalars, text, values
from trainvet.integrations.tensorboard.event_file import EventFile
from trainvet.integrations.tensorboard.writer import Background
from trainvet.recording import facts_to_dict, jsonable
from trainvet.report import Report
from trainvet.statistics import Facts, Snapshot

BUDGET, BUDGET_PER_STEP, RESERVE = 1_000_000, 2_000, 500_000
MATRICES = 2048
REPORTS = 16
SPARSE = 10
WAITING = 1000
LONGEST_BACKOFF = 600.0
THINNING = (
    f"A sampled snapshot's matrix is left out while the files would hold more than {BUDGET:,} bytes plus {BUDGET_PER_STEP:,} per step "
    f"(a step with findings may take {RESERVE:,} more), and of those that fit only every 2nd, 4th, ... is kept after each {MATRICES:,} "
    f"matrices. Such a snapshot has sampled = 1 and no stats; series are always written."
)
SCHEMA, ENVIRONMENT, FACTS, STATS, SERIES, SNAPSHOT, FINDINGS, END = (
    values.PREFIX + name for name in ("schema", "environment", "facts", "stats", "series", "snapshot", "findings", "end")
)
PARTS = frozenset({SNAPSHOT, STATS, SERIES})
log = logging.getLogger("trainvet")


def dumps(data: Any) -> str:
    """Strict JSON, ASCII only."""
    return json.dumps(jsonable(data, depth=200), allow_nan=False, separators=(",", ":"))


class Journal:
    """Writes one Event per report step; for every tag the steps of one file grow strictly.

    After a failed write the file is left as it is (it ends with a whole record), what follows is dropped and counted for ``backoff``
    seconds, doubling up to 10 minutes, and then goes to a new file with a head of its own. Findings wait in memory meanwhile.
    """

    def __init__(self, directory: Path, backoff: float = 30.0) -> None:
        self.directory = directory
        self.queue: Background | None = None
        self.lost = self.thinned = self.matrices = self.snapshots = 0
        self._file: EventFile | None = None
        self._backoff = self._wait = backoff
        self._retry_at = 0.0
        self._warned = False
        self._bytes = self._sampled = self._texts = self._start = 0
        self._drawn = -SPARSE
        self._last: dict[str, int] = {}
        self._highest = -1
        self._known: set[str] = set()
        self._environment: Mapping[str, Any] = {}
        self._facts: Facts | None = None
        self._facts_step = 0
        self._layout = layouts.Layout()
        self._aggregates = scalars.Aggregates()
        self._present: dict[str, float] = {}
        self._waiting: list[str] = []
        self._told = ""

    @property
    def dropped(self) -> int:
        """Snapshots that reached no file: the queue was full, or the disk."""
        return self.lost + (0 if self.queue is None else self.queue.dropped)

    # ---- what happens in a run

    def start(self, step: int, environment: Mapping[str, Any], now: float) -> None:
        """The head of the first file. Raises OSError where no file can be made."""
        self._environment, self._start = environment, step
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = EventFile(self.directory)  # raises; an error after this is a full disk
        try:
            self._head(step, now)
        except OSError as error:
            self._failed(error)

    def facts(self, step: int, facts: Facts, now: float) -> None:
        """The plan. What follows gets rows and columns of its own."""
        self._facts, self._facts_step = facts, step
        self._layout = layouts.Layout(generation=self._layout.generation)
        self._present = {}
        if self._file is None:
            self._emit(step, {}, now)  # its head says it
        else:
            self._emit(step, self._plan(), now, ahead=step)

    def write(self, step: int, snapshot: Snapshot, findings: Sequence[Finding], report: Report | None, now: float) -> None:
        """A snapshot, what was found in it, and the report if that has changed."""
        out: dict[str, Any] = {}
        urgent = any(finding.severity >= Severity.ERROR for finding in findings)
        self._waiting += [dumps(finding.to_dict()) for finding in findings]
        del self._waiting[:-WAITING]
        held = bool(snapshot.tables or snapshot.series)
        if held:
            out |= self._numbers(step, snapshot, bool(findings), now)
        if report is not None:
            out |= self._judgement(report)
        done = self._emit(step, out, now, sync=urgent)
        if held:
            self.snapshots += done
            self.matrices += done and STATS in out
            self.lost += not done

    def report(self, step: int, report: Report, now: float) -> None:
        """The report by itself; with the end record when the run has ended."""
        ended = report.status != "running"
        out = self._judgement(report)
        if ended:
            end = {"v": layouts.VERSION, "status": report.status, "reason": report.reason, "last_step": step, "snapshots": self.snapshots}
            end |= {"matrices": self.matrices, "matrices_thinned": self.thinned, "dropped": self.dropped, "report": report.to_dict()}
            out[END] = values.strings([dumps(end)])
        self._emit(step, out, now, sync=ended, force=ended)

    def close(self) -> None:
        """What still waits, to the device; the file is closed."""
        if self._waiting:
            self._emit(self._highest + 1, {}, time.time(), force=True)
        if self._file is not None:
            try:
                self._file.sync()
            except OSError as error:
                self._failed(error)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; never raises."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # ---- what is said

    def _numbers(self, step: int, snapshot: Snapshot, found: bool, now: float) -> dict[str, Any]:
        layout, out = self._layout, {}
        if layout.fit(snapshot):
            self._emit(step, self._schema(), now)
        fits = bool(snapshot.tables) and self._fits(step, 4 * len(layout.subjects) * layout.width, found)
        if snapshot.tables and not fits:
            self.thinned += 1
            if self.thinned == 1:
                layout.generation += 1
                self._emit(step, self._schema(), now)
        out[SNAPSHOT] = values.array(layouts.meta(snapshot, layout.generation, self.thinned, self.dropped))
        if fits:
            out[STATS] = values.array(layout.pack_tables(snapshot))
        if snapshot.series:
            out[SERIES] = values.array(layout.pack_series(snapshot))
        if snapshot.aside:
            return out
        self._aggregates.add(snapshot)
        if snapshot.tables or found or step >= self._drawn + SPARSE:
            self._drawn = step
            out |= {tag: values.scalar(number) for tag, number in self._aggregates.of(snapshot).items()}
        column = snapshot.column("gradient.present")
        if column is not None:
            first = not self._present
            self._present.update(zip(column[0], column[1].tolist(), strict=True))
            if first and self._facts is not None:
                out |= self._layers()
        return out

    def _fits(self, step: int, size: int, found: bool) -> bool:
        self._sampled += 1
        if self._sampled % (1 << self.matrices // MATRICES) and not found:
            return False
        return self._bytes + size <= BUDGET + BUDGET_PER_STEP * (step - self._start + 1) + (RESERVE if found else 0)

    def _judgement(self, report: Report) -> dict[str, Any]:
        out = {tag: values.scalar(number) for tag, number in scalars.of_report(report).items()}
        ended = report.status != "running"
        if ended or self._texts < REPORTS:
            self._texts += 1
            told = text.report_text(report)
            if told != self._told:
                self._told = told
                out[values.PREFIX + "report"] = values.markdown(told)
        if ended and self._facts is not None:
            out |= self._layers()
        return out

    def _schema(self) -> dict[str, Any]:
        schema = self._layout.to_dict() | {"thinning": THINNING, "matrices_thinned": self.thinned, "start": self._start}
        return {SCHEMA: values.strings([dumps(schema)])}

    def _plan(self, repeated: bool = False) -> dict[str, Any]:
        plan = {"v": layouts.VERSION, "step": self._facts_step, "repeated": repeated, "facts": facts_to_dict(self._facts)}
        return {FACTS: values.strings([dumps(plan)])}

    def _layers(self) -> dict[str, Any]:
        assert self._facts is not None
        return {values.PREFIX + "layers": values.markdown(text.layers_text(self._facts, self._present))}

    def _schedules(self, step: int, now: float) -> None:
        """The predicted learning rates from ``step`` on, once per parameter group and file. They lie ahead of everything else."""
        if self._facts is not None:
            for ahead, numbers in scalars.predicted(self._facts, step):
                told = {tag: values.scalar(number) for tag, number in numbers.items() if self._last.get(tag, -1) < ahead}
                if told:
                    self._append(values.event(ahead, now, told, self._known))
                    self._last |= dict.fromkeys(told, ahead)

    # ---- how it gets there

    def _emit(self, step: int, out: dict[str, Any], now: float, *, sync: bool = False, force: bool = False, ahead: int | None = None) -> bool:
        """One Event at ``step``; tags that were already written at this step or later go to a second one just after it. With ``ahead`` the
        predicted learning rates from that step on follow."""
        if self._file is None and not force and time.monotonic() < self._retry_at:
            return False
        try:
            if self._file is None:
                self._file = EventFile(self.directory)
                self._head(max(step, self._highest + 1), now)
            if self._waiting:
                out[FINDINGS] = values.strings(self._waiting)
            late = {tag: value for tag, value in out.items() if self._last.get(tag, -1) >= step}
            if not PARTS.isdisjoint(late):  # what belongs to one snapshot stands in one Event
                late |= {tag: out[tag] for tag in PARTS & out.keys()}
            self._put(step, {tag: value for tag, value in out.items() if tag not in late}, now)
            self._put(max((self._last[tag] for tag in late), default=-1) + 1, late, now)
            self._waiting = []
            if ahead is not None:
                self._schedules(ahead, now)
            if sync:
                self._file.sync()
        except OSError as error:
            self._failed(error)
            return False
        self._wait = self._backoff
        return True

    def _put(self, step: int, out: dict[str, Any], now: float) -> None:
        if out:
            self._append(values.event(step, now, out, self._known))
            self._last |= dict.fromkeys(out, step)
            self._known |= out.keys()
            self._highest = max(self._highest, step)

    def _append(self, event: bytes) -> None:
        assert self._file is not None
        self._bytes += self._file.write(event)

    def _head(self, step: int, now: float) -> None:
        """What every file begins with, so that each can be read without the others."""
        self._known, self._last = set(), {}
        self._append(values.version(now))
        self._append(values.session_start(step, now))
        told = {ENVIRONMENT: values.strings([dumps(self._environment)])}
        told[values.PREFIX + "environment_text"] = values.markdown(text.environment_text(self._environment))
        told["custom_scalars__config__"] = values.data([scalars.dashboard()], "custom_scalars", b"")
        if self._facts is not None:
            told |= self._plan(repeated=self._highest >= 0)
        if self._layout.subjects or self._layout.series:
            told |= self._schema()
        self._put(step, told, now)
        self._schedules(step, now)

    def _failed(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close(delete=not self._last)  # a head that does not fit is no use
        self._told = ""
        self._retry_at = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, LONGEST_BACKOFF)
        if not self._warned:
            self._warned = True
            log.warning("trainvet: event files in %s cannot be written (%s); training goes on", self.directory, error.strerror or error)

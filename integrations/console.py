"""A run in the terminal: a line at once for each new headline, the report at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainvet.cause import first
from trainvet.finding import Finding, Severity
from trainvet.recording import printable
from trainvet.report import CHECKED, Report, finding_lines
from trainvet.statistics import Facts, Snapshot

MOST = 10
STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red", Severity.FATAL: "bold red"}


class ConsoleSink:
    """Writes to standard error (or ``stream``): colours and a table where that is a terminal and rich is installed, plain text elsewhere.

    Names and messages come from the user's program and are shown as they are, never read as markup or control codes.
    """

    def __init__(self, log_dir: Path | None, stream: TextIO | None = None) -> None:
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._stream = stream
        self._pid = os.getpid()
        self._told: set[tuple[str, int, str]] = set()
        self._fresh: set[tuple[str, int, str]] = set()
        self._ended = False

    def start(self, step: int, environment: Mapping[str, Any]) -> None:
        """Nothing is said at the start."""

    def facts(self, step: int, facts: Facts) -> None:
        """Nothing is said of the plan."""

    def write(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        """Remember what is new; whether it is a headline or a consequence stands in the report that follows."""
        self._fresh = {_key(finding) for finding in findings}

    def report(self, step: int, report: Report) -> None:
        """New headlines of WARNING and above at once; the whole report when the run has ended."""
        if self._ended or os.getpid() != self._pid:
            return
        if report.status != "running":
            self._ended = True
            self._show_end(report)
            return
        for head in report.findings:
            if head.severity >= Severity.WARNING and _key(head) in self._fresh - self._told:
                self._told.add(_key(head))
                self._show_headline(head)
        self._fresh = set()

    def close(self) -> None:
        """Nothing is held open."""
        self._ended = True

    def __getstate__(self) -> dict[str, Any]:
        return {"log_dir": self.log_dir}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["log_dir"])  # type: ignore[misc]
        self._ended = True

    # ---- inside

    def _out(self) -> TextIO | None:
        return self._stream if self._stream is not None else sys.stderr

    def _console(self) -> Any:
        out = self._out()
        if out is None or not out.isatty():
            return None
        try:
            from rich.console import Console
        except ImportError:
            return None
        return Console(file=out, highlight=False, emoji=False, markup=False)

    def _print(self, lines: Sequence[str]) -> None:
        out = self._out()
        if out is not None:
            text = "\n".join(printable(line) for line in lines) + "\n"
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write(text.encode(encoding, "replace").decode(encoding))
            out.flush()

    def _show_headline(self, head: Finding) -> None:
        words = f"{head.code} {head.name}  step {head.step}  {head.where}: {head.message}"
        console = self._console()
        if console is None:
            self._print([f"trainvet {head.severity.name}: {words}"])
            return
        from rich.text import Text

        console.print()  # leaves the line a progress bar is drawing on
        label = Text(f" {head.severity.name} ", style=f"reverse {STYLES[head.severity]}")
        console.print(Text("trainvet ") + label + Text(" " + printable(words)))

    def _show_end(self, report: Report) -> None:
        console = self._console()
        shown = report.findings[:MOST]
        if console is None:
            lines = [report.verdict()]
            for finding in shown:
                lines += ["", *finding_lines(finding)]
            self._print([*lines, *self._more(report), "", *_coverage(report), *self._pointer()])
            return
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        head = first(report.findings)
        judged = any(item.state == CHECKED for item in report.coverage)
        style = STYLES[head.severity] if head is not None else "green" if judged else "none"
        console.print(Panel(Text(printable(report.verdict())), border_style=style, expand=False))
        if shown:
            table = Table("", "what", "step", "where", "what it means, what to try", pad_edge=False, box=None, header_style="dim")
            for finding in shown:
                said = Text(printable(finding.message))
                if finding.causes:
                    said.append("\nlikely cause: " + printable(finding.causes[0]), style="dim")
                for fix in finding.fixes[:2]:
                    said.append("\ntry: " + printable(fix), style="dim")
                if finding.consequences:
                    said.append(
                        "\nthen: " + printable(", ".join(dict.fromkeys(f"{item.code} {item.name}" for item in finding.consequences))), style="dim"
                    )
                label = Text(finding.severity.name, style=STYLES[finding.severity])
                table.add_row(
                    label, Text(printable(f"{finding.code} {finding.name}")), Text(str(finding.first_step)), Text(printable(finding.where)), said
                )
            console.print(table)
        for line in (*self._more(report), *_coverage(report), *self._pointer()):
            console.print(Text(printable(line), style="dim"))

    def _more(self, report: Report) -> list[str]:
        hidden = len(report.findings) - MOST
        return [f"and {hidden} more findings"] if hidden > 0 else []

    def _pointer(self) -> list[str]:
        if self.log_dir is None:
            return []
        root = self.log_dir.parent if self.log_dir.name == "trainvet" else self.log_dir
        return [f"all of it: {self.log_dir}; tensorboard --logdir {root}"]


def _key(finding: Finding) -> tuple[str, int, str]:
    return finding.code, finding.step, finding.where


def _coverage(report: Report) -> list[str]:
    """What was checked, what was not and why, one line per reason; notes, errors, cost."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in report.coverage:
        groups.setdefault((item.state, "" if item.state == CHECKED else item.detail), []).append(item.code)
    ranked = sorted(groups.items(), key=lambda group: group[0][0] != CHECKED)
    lines = [f"{state}: {', '.join(codes)}" + (f" ({detail})" if detail else "") for (state, detail), codes in ranked]
    if report.cost:
        lines.append(report.cost_line())
    lines += [f"note: {note}" for note in report.notes]
    return lines + [f"error inside trainvet (training went on): {error.strip().splitlines()[-1]}" for error in report.errors if error.strip()]

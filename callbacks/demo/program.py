"""A program of the demo, what must be found in it, and what was found."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainvet.cause import first
from trainvet.finding import Severity
from trainvet.report import Report

HEALTHY = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A small training: ``train(log_dir)`` runs it and returns trainvet's report. ``expected`` is the code to be found, or HEALTHY."""

    name: str
    title: str
    expected: str
    train: Callable[[Path], Report]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was found: ``codes`` of all headlines of at least a warning, and of the first cause its code, name, place and first advice (empty where
    there is none)."""

    framework: str
    title: str
    expected: str
    codes: tuple[str, ...] = ()
    code: str = ""
    name: str = ""
    where: str = ""
    fix: str = ""
    errors: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """A broken net got the expected finding, a healthy one no warning, and nothing failed inside trainvet."""
        found = self.expected in self.codes if self.expected else not self.codes
        return found and not self.errors

    @classmethod
    def of(cls, framework: str, program: Program, report: Report) -> Outcome:
        """Reads a report. Where the expected finding is one of several headlines, it is the one told."""
        head = next((finding for finding in report.findings if finding.code == program.expected), None)
        head = head or first(report.findings)
        told: dict[str, Any] = {} if head is None else {"code": head.code, "name": head.name, "where": head.where, "fix": (*head.fixes, "")[0]}
        codes = tuple(finding.code for finding in report.findings if finding.severity >= Severity.WARNING)
        return cls(framework, program.title, program.expected, codes, errors=report.errors, **told)

    @classmethod
    def read(cls, path: Path) -> list[Outcome]:
        """What :func:`run` has written so far."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        outcomes = []
        for line in lines:
            fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()}
            outcomes.append(cls(**fields))
        return outcomes


def run(framework: str, programs: Sequence[Program], arguments: Sequence[str]) -> int:
    """The process of one framework: arguments are the directory of the runs and the file that outcomes are appended to."""
    log_dir, results = Path(arguments[0]), Path(arguments[1])
    for number, program in enumerate(programs, 1):
        print(f"\n[{framework} {number} of {len(programs)}] {program.title}", flush=True)
        report = program.train(log_dir / f"{framework}-{program.name}")
        outcome: dict[str, Any] = dataclasses.asdict(Outcome.of(framework, program, report))
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()
    return 0

"""What is told about a run: headlines in causal order, what was checked and what could not be, and what it cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from trainvet.cause import first
from trainvet.finding import Finding, Severity

CHECKED, MISSING, UNOBSERVABLE, NO_DATA, FAILED = "checked", "evidence missing", "not observable", "no data", "switched off"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How far one rule got: ``state`` is one of the constants above, ``detail`` says how often, what is missing or why."""

    code: str
    name: str
    state: str
    detail: str = ""
    checks: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
    """A run as it stands. ``findings`` are the headlines in causal order, each with its consequences.

    ``status`` is "running", "finished", "aborted" or "failed"; ``reason`` says why it ended. ``steps`` counts optimizer-step attempts
    (Keras: batches), ``applied`` those that changed weights. ``cost`` is our own measured time in seconds and as a share of the run.
    ``notes`` hold what the user should know (what is watched, what could not be prevented); ``errors`` are errors inside trainvet.
    ``exempted`` says what the user's ``ignore`` and ``profile`` kept quiet.
    """

    findings: tuple[Finding, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    status: str = "running"
    reason: str = ""
    steps: int = 0
    applied: int = 0
    last_good_step: int | None = None
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exempted: tuple[str, ...] = ()

    @property
    def worst(self) -> Severity | None:
        """The highest severity among the headlines; None where there is none."""
        return max((finding.severity for finding in self.findings), default=None)

    def exceeds(self, level: Severity) -> bool:
        """Is there a headline of at least ``level``?"""
        return self.worst is not None and self.worst >= level

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "status": self.status,
            "reason": self.reason,
            "steps": self.steps,
            "applied": self.applied,
            "last_good_step": self.last_good_step,
            "findings": [finding.to_dict() for finding in self.findings],
            "coverage": [dataclasses.asdict(item) for item in self.coverage],
            "notes": list(self.notes),
            "errors": list(self.errors),
            "exempted": list(self.exempted),
            "cost": dict(self.cost),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        names = {field.name for field in dataclasses.fields(Coverage)}
        good = data["last_good_step"]
        return cls(
            findings=tuple(Finding.from_dict(item) for item in data["findings"]),
            coverage=tuple(Coverage(**{key: item[key] for key in names & item.keys()}) for item in data["coverage"]),
            status=str(data["status"]),
            reason=str(data["reason"]),
            steps=int(data["steps"]),
            applied=int(data["applied"]),
            last_good_step=None if good is None else int(good),
            notes=tuple(str(note) for note in data["notes"]),
            errors=tuple(str(error) for error in data["errors"]),
            exempted=tuple(str(line) for line in data.get("exempted", ())),
            cost={str(key): float(value) for key, value in data["cost"].items()},
            environment=dict(data["environment"]),
        )

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)

    def to_text(self) -> str:
        """The report for a terminal or a log, without colours."""
        lines = [self.verdict()]
        for finding in self.findings:
            lines += ["", *finding_lines(finding)]
        lines += ["", *self.coverage_lines()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"error inside trainvet (training went on): {error.strip().splitlines()[-1]}" for error in self.errors]
        return "\n".join(lines)

    def verdict(self) -> str:
        """One sentence: what happened, and the first cause."""
        what = f"{self.status} after {self.steps} steps ({self.applied} applied)"
        head = first(self.findings)
        if head is not None:
            return f"trainvet: {what}. First cause: {head.code} {head.name} at {head.where or 'the run'}, step {head.first_step}."
        checked = sum(item.state == CHECKED for item in self.coverage)
        return f"trainvet: {what}. No warnings; {checked} of {len(self.coverage)} rules had the evidence to judge."

    def coverage_lines(self) -> list[str]:
        """Grouped by state: which rules could judge, which could not and why."""
        lines = []
        done = [item for item in self.coverage if item.state == CHECKED]
        if done:
            lines.append("checked: " + ", ".join(f"{item.code} ({item.checks}x)" for item in done))
        for item in self.coverage:
            if item.state != CHECKED:
                lines.append(f"{item.state}: {item.code} {item.name}" + (f": {item.detail}" if item.detail else ""))
        lines += [f"exempted: {line}" for line in self.exempted]
        if self.cost:
            lines.append(self.cost_line())
        return lines

    def cost_line(self) -> str:
        """Our own time, in seconds and as a share of the run."""
        return f"cost: {self.cost.get('seconds', 0.0):.3g} s inside trainvet, {100 * self.cost.get('share', 0.0):.2g} % of the run"


def finding_lines(finding: Finding) -> list[str]:
    """A finding as a sanitizer would print it: what, where, since when, evidence, next step, what would mute it."""
    since = f"since step {finding.first_step}, seen at step {finding.step}" if finding.first_step != finding.step else f"step {finding.step}"
    lines = [f"{finding.severity.name} {finding.code} {finding.name}  {since}  {finding.where}", f"  {finding.message}"]
    if finding.evidence:
        numbers = ", ".join(f"{key} {_number(value)}" for key, value in finding.evidence.items())
        lines.append(f"  evidence: {numbers}" + (f" (limit: {finding.threshold})" if finding.threshold else ""))
    if finding.causes:
        lines.append(f"  likely cause: {finding.causes[0]}")
    lines += [f"  try: {fix}" for fix in finding.fixes[:3]]
    for consequence in finding.consequences:
        lines.append(f"  then: {consequence.code} {consequence.name} step {consequence.step} {consequence.where}")
    lines.append(f"  `trainvet rule {finding.code}` explains; ignore={_entries(finding.mute)} silences it")
    return lines


def _entries(names: tuple[str, ...]) -> str:
    """A tuple as it would be typed, in double quotes."""
    return "(" + ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "") + ")"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

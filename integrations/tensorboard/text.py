"""Markdown for the Text dashboard. Names and messages are untrusted: nothing in them is read as Markdown or HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainvet.finding import Finding
from trainvet.recording import jsonable, printable
from trainvet.report import CHECKED, Report
from trainvet.statistics import Facts, Subject

_ESCAPED = {ord(char): f"&#{ord(char)};" for char in "&<>|`*_[]()#!\\~{}$^=+:\"'"}
MOST_LAYERS, MOST_FINDINGS, MOST_LINES, MOST_CHARACTERS = 500, 50, 200, 40_000


def escape(text: Any, most: int = 2000) -> str:
    """Untrusted text on one line, every character with a meaning in Markdown or HTML as a character reference."""
    return printable(text, most).translate(_ESCAPED)


def report_text(report: Report) -> str:
    """The whole report: verdict, a heading and a list per headline, what was checked."""
    lines = [f"**{escape(report.verdict())}**", ""]
    if report.reason:
        lines += [escape(report.reason), ""]
    for finding in report.findings[:MOST_FINDINGS]:
        lines += _finding(finding)
    if len(report.findings) > MOST_FINDINGS:
        lines += [f"and {len(report.findings) - MOST_FINDINGS} more findings", ""]
    lines += ["### What was checked", "", "| rule | state | how far |", "| --- | --- | --- |"]
    for item in report.coverage:
        how = f"{item.checks} times" if item.state == CHECKED and not item.detail else item.detail
        lines.append(f"| {escape(item.code)} {escape(item.name)} | {escape(item.state)} | {escape(how)} |")
    lines += ["", *(f"- note: {escape(note)}" for note in report.notes)]
    lines += [f"- error inside trainvet (training went on): {escape(error.strip().splitlines()[-1])}" for error in report.errors if error.strip()]
    if report.cost:
        lines.append(f"- {escape(report.cost_line())}")
    return _cut(lines)


def _finding(finding: Finding) -> list[str]:
    since = f"since step {finding.first_step}, seen at step {finding.step}" if finding.first_step != finding.step else f"step {finding.step}"
    lines = [f"### {finding.severity.name} {escape(finding.code)} {escape(finding.name)}: {escape(finding.where) or 'the run'}", ""]
    lines += [f"- {since}", f"- {escape(finding.message)}"]
    if finding.evidence:
        numbers = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in finding.evidence.items())
        lines.append(f"- evidence: {escape(numbers)}" + (f" (limit: {escape(finding.threshold)})" if finding.threshold else ""))
    lines += [f"- likely cause: {escape(cause)}" for cause in finding.causes[:1]]
    lines += [f"- try: {escape(fix)}" for fix in finding.fixes[:3]]
    for item in finding.consequences[:20]:
        lines.append(f"- then: {escape(item.code)} {escape(item.name)}, step {item.step}, {escape(item.where)}")
    return [*lines, ""]


def environment_text(environment: Mapping[str, Any]) -> str:
    """What the run was started with, as a nested list."""
    lines: list[str] = []

    def tell(items: Mapping[str, Any], depth: int) -> None:
        for key, value in items.items():
            if isinstance(value, dict) and value and depth < 4:
                lines.append(f"{'    ' * depth}- **{escape(key, 200)}**")
                tell(value, depth + 1)
            else:
                lines.append(f"{'    ' * depth}- **{escape(key, 200)}**: {escape(value)}")

    plain = jsonable(environment)
    tell(plain if isinstance(plain, dict) else {}, 0)
    more = [f"- and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return _cut([*lines[:MOST_LINES], *more] or ["not recorded"])


def layers_text(facts: Facts, present: Mapping[str, float]) -> str:
    """One row per module, in the order of the forward pass where that is known: type, output shape, parameters, trainable, gradient seen.

    ``present`` holds the latest "gradient.present" of every parameter of which it was measured.
    """
    modules: dict[str, list[Subject]] = {}
    for subject in facts.subjects:
        if subject.kind in ("parameter", "activation"):
            modules.setdefault(subject.module, []).append(subject)
    depth = {module: min((item.depth for item in held if item.depth >= 0), default=1 << 30) for module, held in modules.items()}
    lines = ["| module | type | output shape | parameters | trainable | gradient seen |", "| --- | --- | --- | --- | --- | --- |"]
    for module, held in sorted(modules.items(), key=lambda item: depth[item[0]])[:MOST_LAYERS]:
        own = [subject for subject in held if subject.kind == "parameter"]
        shapes = [str(tuple(subject.shape)) for subject in held if subject.kind == "activation" and subject.shape]
        seen = [present[subject.name] > 0 for subject in own if subject.name in present]
        cells = (
            escape(module, 200) or "the model itself",
            escape(next((subject.module_type for subject in held if subject.module_type), ""), 100),
            escape(", ".join(dict.fromkeys(shapes)), 200),
            f"{sum(subject.numel for subject in own):,}",
            _share([subject.trainable for subject in own]),
            _share(seen) or ("not measured" if own else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"and {len(modules) - MOST_LAYERS} more modules"] if len(modules) > MOST_LAYERS else []
    total = sum(subject.numel for subject in facts.subjects if subject.kind == "parameter")
    trainable = sum(subject.numel for subject in facts.subjects if subject.kind == "parameter" and subject.trainable)
    return _cut([f"{total:,} parameters, {trainable:,} trainable", "", *lines])


def _cut(lines: list[str]) -> str:
    """Whole lines, up to the limit of characters."""
    room = MOST_CHARACTERS
    for count, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            return "\n".join([*lines[:count], "", f"{len(lines) - count} more lines were cut"]) + "\n"
    return "\n".join(lines) + "\n"


def _share(marks: list[bool]) -> str:
    if not marks:
        return ""
    return "yes" if all(marks) else "no" if not any(marks) else f"{sum(marks)} of {len(marks)}"

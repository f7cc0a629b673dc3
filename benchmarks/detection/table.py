"""The figures as Markdown and JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.detection.score import Row, Share, alarms, judge, learnt, summary, twins

PACKAGES = ("trainvet", "torch", "lightning", "keras", "tensorflow", "tensorflow-cpu", "transformers", "scikit-learn", "numpy")


def commit() -> str:
    """What was measured, if this is a checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, str]:
    """Python and the packages that matter."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()} with {os.cpu_count()} CPUs", "commit": commit()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def groups(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows by one of their fields."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def plain(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON types."""
    return {name: value.to_dict() if isinstance(value, Share) else value for name, value in figures.items()}


def results(rows: Sequence[Row], command: str, planned: int) -> dict[str, Any]:
    """Everything that was measured, as JSON types."""
    healthy = twins(row for row in rows if "skipped" not in row)
    return {
        "command": command,
        "planned runs": planned,
        "environment": environment(),
        "all": plain(summary(rows)),
        "by framework": {name: plain(summary(part)) for name, part in groups(rows, "framework").items()},
        "by operator": {name: plain(summary(part, healthy)) for name, part in groups(rows, "operator").items() if name},
        "rows": list(rows),
    }


def markdown(rows: Sequence[Row], command: str, planned: int) -> str:
    """Figures by framework and by operator, false alarms and misses one by one."""
    healthy = twins(row for row in rows if "skipped" not in row)
    frameworks = groups(rows, "framework")
    columns = {"all": summary(rows), **{name: summary(part) for name, part in frameworks.items()}}
    names = list(columns["all"])
    lines = [
        "# How often trainvet is right",
        "",
        f"`{command}`",
        "",
        ", ".join(f"{name} {number}" for name, number in environment().items()) + ".",
        "",
    ]
    lines += [f"{planned} runs were planned, {len(rows)} of them were made" + (" before the time was up." if len(rows) < planned else "."), ""]
    lines += ["Seeds of one recipe are not independent of each other: the intervals take them as if they were.", ""]
    lines += ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {name} | " + " | ".join(cell(columns[column][name]) for column in columns) + " |" for name in names]
    lines += [
        "",
        "## By fault",
        "",
        "| fault | counted | alarmed | diagnosed | first headline right | steps | first advice trains |",
        "| --- |" + " --- |" * 6,
    ]
    for name, part in sorted(groups(rows, "operator").items()):
        if name:
            figures = summary(part, healthy)
            keys = ("alarmed", "recall", "first headline right, with its place", "steps to detection, median", "first advice makes the run train")
            lines.append(f"| {name} | {figures['faults counted']} | " + " | ".join(short(figures[key]) for key in keys) + " |")
    usable = [row for row in rows if "skipped" not in row]
    lines += ["", "## False alarms on healthy runs", ""]
    lines += listed(usable, lambda row: not row["operator"] and learnt(row) and bool(alarms(row)))
    lines += ["", "## Faults that were not diagnosed, or whose first headline is another", ""]

    def missed(row: Row) -> bool:
        verdict = judge(row, healthy.get((row["framework"], row["recipe"], row["seed"]))) if row["operator"] else None
        return verdict is not None and verdict.counted and not (verdict.diagnosed and verdict.headline)

    lines += listed(usable, missed)
    lines += ["", "## Healthy recipes that did not learn, and runs without a result", ""]
    lines += listed(usable, lambda row: not row["operator"] and not learnt(row))
    lines += [
        f"- {title(row)}: {row['skipped'].strip().splitlines()[-1]}" for row in rows if row.get("skipped", "does not apply") != "does not apply"
    ]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A figure for a table."""
    if isinstance(value, list):
        return "no data" if value[0] is None else f"{value[0]:.3f} (95 % {value[1]:.3f} to {value[2]:.3f})"
    return "no data" if value is None else str(value)


def short(value: Any) -> str:
    """A share as "3/4"."""
    return f"{value.hits}/{value.of}" if isinstance(value, Share) else cell(value)


def title(row: Row) -> str:
    """Which run it is."""
    return f"{row['framework']} {row['recipe']} {row['operator']}".strip() + f", seed {row['seed']}"


def listed(rows: Sequence[Row], chosen: Callable[[Row], bool]) -> list[str]:
    """One line per row, with its headlines."""
    lines = []
    for row in filter(chosen, rows):
        told = "; ".join(
            f"{head['code']} {head['severity']} step {head['step']} at {head['where'][:60]}: {head['message'][:160]}" for head in row["findings"]
        )
        score = "none" if row["score"] is None else f"{row['score']:.3f}"
        lines.append(f"- {title(row)}, score {score}: {told or 'nothing said'}")
    return lines or ["none"]

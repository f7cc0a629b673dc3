"""The command line: rules, rule, symptom, report, check, demo. Loads no framework, except in the demo."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainvet import __version__
from trainvet.finding import Finding, Severity
from trainvet.recording import Recording, jsonable, printable, replay
from trainvet.report import Report
from trainvet.rule import Rule, catalogue, defect, explain, resolve, split_place
from trainvet.selection import PROFILES, choose
from trainvet.symptom import SYMPTOMS, find, page

UNFINISHED = "no end record: the run was killed or is still going"
LEVELS = ("warning", "error", "fatal")
FRAMEWORKS = ("lightning", "keras")


class InputError(ValueError):
    """What the user gave cannot be used; the message is one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 where ``--fail-on`` was reached, 2 for bad input."""
    arguments = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except BrokenPipeError:  # "trainvet rules | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{name}{error.strerror or error}")
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="trainvet", description="Vets neural-network training while it runs.")
    top.add_argument("--version", action="version", version=f"trainvet {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("rules", help="list all rules")
    listing.add_argument("--markdown", action="store_true", help="as a Markdown table")
    listing.set_defaults(command=_rules)

    one = commands.add_parser("rule", help="explain one rule")
    one.add_argument("rule", metavar="CODE_OR_NAME")
    one.set_defaults(command=_rule)

    symptom = commands.add_parser("symptom", help="from what you see to the rules that look for its causes")
    symptom.add_argument("words", nargs="*", metavar="WORDS", help="such as: my loss is NaN (default: all symptoms)")
    symptom.set_defaults(command=_symptom)

    report = commands.add_parser("report", help="print the report of a recorded run")
    check = commands.add_parser("check", help="judge a recorded run again, with other rules or settings")
    for command in (report, check):
        command.add_argument("log_dir", metavar="LOGDIR", type=Path, help="a run's directory, or one above it")
        command.add_argument("--fail-on", choices=LEVELS, help="exit with 1 when a headline is at least this severe")
        command.add_argument("--json", action="store_true", help="print the report as JSON")
    report.set_defaults(command=_report)
    check.add_argument("--select", nargs="+", metavar="RULE", help="rules to run (default: those of the run, else the default ones)")
    check.add_argument("--ignore", nargs="+", metavar="RULE", help="rules or places to mute")
    check.add_argument("--settings", metavar="JSON", help="""such as '{"dead-relu": {"share": 0.6}}', or a file that holds it""")
    check.add_argument("--profile", choices=sorted(PROFILES), help="as in the callback")
    check.set_defaults(command=_check)

    demo = commands.add_parser("demo", help="train small nets, healthy and broken, and see what is found")
    demo.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"{', '.join(FRAMEWORKS)} (default: those that are installed)")
    demo.add_argument("--log-dir", metavar="DIR", default=None)
    demo.set_defaults(command=_demo)
    return top


# ---- the rules


def _rules(arguments: argparse.Namespace) -> int:
    rows = [(kind.code, defect(kind), kind.severity.name.lower(), kind.trust, _what(kind)) for kind in catalogue().values()]
    head = ("code", "name", "severity", "trust", "what it checks")
    if arguments.markdown:
        _print("| " + " | ".join(head) + " |", "| --- | --- | --- | --- | --- |")
        for code, name, severity, trust, what in rows:
            _print(f"| {code} | `{name}` | {severity} | {trust} | {what.replace('|', chr(92) + '|')} |")
        return 0
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    for row in (head, *rows):
        _print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]))
    return 0


def _what(kind: type[Rule]) -> str:
    """The first sentence of a rule's page."""
    page = inspect.cleandoc(kind.__doc__ or "")
    text = " ".join(line for line in page.split("\n## ")[0].splitlines() if not line.startswith("#")).strip()
    end = text.find(". ")
    return " ".join((text if end < 0 else text[: end + 1]).split())


def _rule(arguments: argparse.Namespace) -> int:
    kinds = resolve(arguments.rule)
    for kind in kinds:
        _print(*explain(kind).splitlines())
    return 0


def _symptom(arguments: argparse.Namespace) -> int:
    for symptom in find(" ".join(arguments.words)) if arguments.words else SYMPTOMS:
        _print(*page(symptom), "")
    return 0


# ---- recorded runs


def _report(arguments: argparse.Namespace) -> int:
    from trainvet.integrations.runs import recorded_report, run_below

    report, notes = recorded_report(run_below(arguments.log_dir))
    return _show(report, notes, arguments)


def _check(arguments: argparse.Namespace) -> int:
    from trainvet.integrations.runs import run_below
    from trainvet.integrations.tensorboard.reader import read
    from trainvet.monitor import Monitor

    directory = run_below(arguments.log_dir)
    recording = read(directory)
    if not recording.snapshots and not recording.facts.subjects:
        raise InputError(f"{directory} holds no snapshot to judge")
    recorded = recording.environment.get("arguments")
    then: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    select = _names(arguments.select, then, "select", ("default",))
    ignore = _names(arguments.ignore, then, "ignore", ())
    settings = _settings_then(then, frozenset(choose(select, ignore).rules))
    for name, numbers in (_settings(arguments.settings) if arguments.settings is not None else {}).items():
        for kind in resolve(name):
            settings[kind.code] = {**settings.get(kind.code, {}), **numbers}
    selection = choose(select, ignore, settings)
    profile = arguments.profile or then.get("profile")
    monitor = Monitor(selection, profile=profile if isinstance(profile, str) and profile in PROFILES else None, environment=recording.environment)
    report = dataclasses.replace(replay(recording, monitor), cost={})
    if recording.end is None:
        report = dataclasses.replace(report, status="no end record", reason=UNFINISHED.split(": ")[1])
    return _show(report, [*_incomplete(recording), *_compared(recording, report)], arguments)


def _names(given: list[str] | None, then: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is not None:
        return tuple(given)
    recorded = then.get(key)
    return tuple(str(name) for name in recorded if _known(str(name))) if isinstance(recorded, list) else default


def _settings_then(then: Mapping[str, Any], codes: frozenset[str]) -> dict[str, dict[str, Any]]:
    recorded = then.get("settings")
    if not isinstance(recorded, dict):
        return {}
    return {code: dict(numbers) for code, numbers in recorded.items() if code in codes and isinstance(numbers, dict)}


def _known(name: str) -> bool:
    """Is a recorded rule one of this installation? The user's own rules are not."""
    try:
        return bool(resolve(split_place(name)[0]))
    except ValueError:
        return False


def _settings(text: str) -> dict[str, dict[str, Any]]:
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        settings = json.loads(source)
    except OSError as error:
        raise InputError(f"--settings {text!r} is neither a JSON object nor a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--settings is not JSON: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(item, dict) for item in settings.values()):
        raise InputError("""--settings must be an object of objects, such as '{"dead-relu": {"share": 0.6}}'""")
    return settings


def _incomplete(recording: Recording) -> list[str]:
    notes = list(recording.notes)
    then = recording.environment.get("arguments")
    own = then.get("own") if isinstance(then, dict) else None
    if own:
        notes.append(f"not run again, because they are the run's own: {', '.join(map(str, own)) if isinstance(own, list) else own}")
    sampled = recording.thinned + sum(bool(snapshot.tables) for snapshot in recording.snapshots)
    if recording.thinned:
        notes.append(f"{recording.thinned} of {sampled} full measurements were left out of the files to keep them small: rules saw fewer samples")
    if recording.dropped:
        notes.append(f"{recording.dropped} snapshots were dropped when the run was recorded")
    return notes


def _compared(recording: Recording, report: Report) -> list[str]:
    """How today's findings differ from those of the run."""

    def keys(findings: Sequence[Finding]) -> set[tuple[str, int, str]]:
        return {(finding.code, finding.step, finding.where) for finding in findings}

    then = keys(recording.findings)
    now = keys([finding for head in report.findings for finding in (head, *head.consequences)])
    if then == now:
        return [f"the same {len(now)} finding{'s'[: len(now) > 1]} as in the run" if now else "no findings, as in the run"]
    lines = [f"found in the run, not now: {code} step {step} {where}" for code, step, where in sorted(then - now)[:10]]
    return lines + [f"found now, not in the run: {code} step {step} {where}" for code, step, where in sorted(now - then)[:10]]


def _show(report: Report, notes: Sequence[str], arguments: argparse.Namespace) -> int:
    if arguments.json:
        _print(json.dumps(jsonable(report.to_dict(), depth=200), indent=1, allow_nan=False), raw=True)
    elif report.status == "no end record":
        so_far = f"{report.steps} steps are recorded" if report.steps else "how far it got is not recorded"
        _print(f"trainvet: {UNFINISHED}. {so_far}; {len(report.findings) or 'no'} headlines so far.")
        if not report.coverage:
            _print("what was checked is told at the end only; `trainvet check` judges what was recorded")
        _print(*report.to_text().splitlines()[1:])
    else:
        _print(*report.to_text().splitlines())
    for note in notes:
        print(f"trainvet: {printable(note)}", file=sys.stderr if arguments.json else sys.stdout)
    return int(arguments.fail_on is not None and report.exceeds(Severity.parse(arguments.fail_on)))


# ---- the demo


def _demo(arguments: argparse.Namespace) -> int:
    from trainvet.callbacks.demo import main as run

    unknown = [name for name in arguments.frameworks if name not in FRAMEWORKS]
    if unknown:
        raise InputError(f"there is no demo for {unknown[0]!r}; one of {', '.join(FRAMEWORKS)}")
    return run(arguments.frameworks, arguments.log_dir)


def _print(*lines: str, raw: bool = False) -> None:
    """Lines come from the user's program or from files: control characters are shown, not obeyed."""
    for line in lines:
        text = line if raw else printable(line, 20_000)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))


def _refuse(message: str) -> int:
    lines = [printable(line) for line in message.splitlines()] or ["bad input"]
    print("trainvet: " + "\n".join(lines), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

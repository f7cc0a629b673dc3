"""The demo trains what it says, and its verdict is about what was found."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import trainvet.callbacks.demo as demo
from tests.examples.programs import needs, run
from trainvet.callbacks.demo.program import HEALTHY, Outcome, Program
from trainvet.finding import Finding, Severity
from trainvet.report import Report


def found(*codes: str) -> Report:
    """A report with one headline per code."""
    names = {"WT104": "oversized-first-update", "AC101": "dead-relu", "NF101": "non-finite-value"}
    return Report(
        status="finished",
        findings=tuple(Finding(code, names[code], Severity.ERROR, 3, 3, "told", where=f"at {code}", fixes=(f"fix {code}",)) for code in codes),
    )


def outcome(expected: str, report: Report) -> Outcome:
    return Outcome.of("lightning", Program("name", "title", expected, lambda log_dir: report), report)


@pytest.mark.parametrize(
    ("expected", "report", "right"),
    [
        (HEALTHY, found(), True),
        (HEALTHY, found("AC101"), False),
        ("WT104", found("WT104"), True),
        ("WT104", found("NF101", "WT104"), True),
        ("WT104", found("AC101"), False),
        ("WT104", found(), False),
        ("WT104", dataclasses.replace(found("WT104"), errors=("a rule was switched off\nTraceback",)), False),
    ],
)
def test_right_is_the_expected_finding_or_none_at_all(expected: str, report: Report, right: bool) -> None:
    assert outcome(expected, report).right is right


def test_the_table_shows_the_expected_finding_its_place_and_the_first_fix() -> None:
    lines = demo.table([outcome("WT104", found("NF101", "WT104")), outcome("AC101", found()), outcome(HEALTHY, found())])
    assert re.fullmatch(r"ok +lightning: title +WT104 oversized-first-update +NF101 non-finite-value, WT104 oversized-first-update", lines[1])
    assert lines[2].strip() == "at at WT104; try: fix WT104"
    assert re.fullmatch(r"WRONG +lightning: title +AC101 dead-relu +nothing", lines[3])
    assert re.fullmatch(r"ok +lightning: title +nothing +nothing", lines[4])
    assert len(lines) == 5


def test_outcomes_survive_the_way_from_the_child_process(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    written = [outcome("WT104", found("NF101", "WT104")), outcome(HEALTHY, found())]
    demo.program.run("lightning", [Program("n", "title", "WT104", lambda log_dir: found("NF101", "WT104"))], [str(tmp_path), str(path)])
    demo.program.run("lightning", [Program("n", "title", HEALTHY, lambda log_dir: found())], [str(tmp_path), str(path)])
    assert Outcome.read(path) == written


def test_what_is_missing_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "_installed", lambda module: module != "sklearn")
    assert demo.main([]) == 2
    assert capsys.readouterr().err == 'trainvet: the demo needs scikit-learn: pip install "trainvet[demo]"\n'
    monkeypatch.setattr(demo, "_installed", lambda module: module != "tensorflow")
    assert demo.main(["keras"]) == 2
    assert capsys.readouterr().err == 'trainvet: the demo needs tensorflow: pip install "trainvet[tensorflow,demo]"\n'


def test_a_program_that_breaks_off_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_installed", lambda module: True)
    monkeypatch.setattr(demo, "NEEDS", {"fortran": ()})
    assert demo.main(["fortran"], tmp_path) == 1
    assert "the fortran programs broke off with exit code 1" in capsys.readouterr().out


def test_lightning(tmp_path: Path) -> None:
    needs("lightning", "sklearn")
    out = run("-m", "trainvet", "demo", "lightning", "--log-dir", "runs", cwd=tmp_path)
    assert "6 of 6 programs went as expected" in out
    assert len(list(tmp_path.glob("runs/lightning-*/trainvet/events.out.tfevents.*"))) == 6


def test_keras(tmp_path: Path) -> None:
    needs("keras", "tensorflow", "sklearn")
    out = run("-m", "trainvet", "demo", "keras", "--log-dir", "runs", cwd=tmp_path)
    assert "5 of 5 programs went as expected" in out
    assert len(list(tmp_path.glob("runs/keras-*/trainvet/events.out.tfevents.*"))) == 5

from __future__ import annotations

import json
import math

import pytest

from trainvet.finding import Finding, Severity
from trainvet.report import CHECKED, MISSING, NO_DATA, UNOBSERVABLE, Coverage, Report

THEN = Finding("WT106", "undersized-update", Severity.WARNING, 60, 50, "small updates", ("b.weight",))
HEAD = Finding(
    "AC101",
    "dead-relu",
    Severity.ERROR,
    40,
    12,
    "97% of the units never respond",
    ("act",),
    evidence={"dead share": 0.97123456, "layers": 1, "loss": math.nan},
    threshold="90 %",
    causes=("a too large update", "another"),
    fixes=("one", "two", "three", "four"),
    consequences=(THEN,),
)
COVERAGE = (
    Coverage("AC101", "dead-relu", CHECKED, "", 12),
    Coverage("LO104", "loss-not-decreasing", MISSING, "120 of 200 steps", 3),
    Coverage("LS101", "repeated-overflow", UNOBSERVABLE, "no loss scaler in use"),
    Coverage("IN101", "non-finite-input", NO_DATA),
)
ERRORS = ("what\nTraceback\nValueError: x",)
REPORT = Report(
    (HEAD,), COVERAGE, "aborted", "dead-relu", 61, 60, 11, ("a note",), ("what\nTraceback\nValueError: x",), {"seconds": 0.5, "share": 0.01}
)


def test_the_text_of_a_report():
    assert REPORT.to_text() == "\n".join(
        [
            "trainvet: aborted after 61 steps (60 applied). First cause: AC101 dead-relu at act, step 12.",
            "",
            "ERROR AC101 dead-relu  since step 12, seen at step 40  act",
            "  97% of the units never respond",
            "  evidence: dead share 0.9712, layers 1, loss nan (limit: 90 %)",
            "  likely cause: a too large update",
            "  try: one",
            "  try: two",
            "  try: three",
            "  then: WT106 undersized-update step 60 b.weight",
            '  `trainvet rule AC101` explains; ignore=("dead-relu@act",) silences it',
            "",
            "checked: AC101 (12x)",
            "evidence missing: LO104 loss-not-decreasing: 120 of 200 steps",
            "not observable: LS101 repeated-overflow: no loss scaler in use",
            "no data: IN101 non-finite-input",
            "cost: 0.5 s inside trainvet, 1 % of the run",
            "note: a note",
            "error inside trainvet (training went on): ValueError: x",
        ]
    )


def test_nothing_found_is_not_called_healthy():
    text = Report((), COVERAGE, "finished", steps=9, applied=9).verdict()
    assert text == "trainvet: finished after 9 steps (9 applied). No warnings; 1 of 4 rules had the evidence to judge."
    assert "0 of 0 rules" in Report().verdict()


def test_information_is_no_first_cause():
    info = Finding("IN104", "imbalanced-labels", Severity.INFO, 5, 5, "text")
    assert "No warnings" in Report((info,)).verdict()
    assert "at the run, step 5" in Report((Finding("LR102", "mismatched-schedule", Severity.WARNING, 5, 5, "text"),)).verdict()


def test_json_and_back():
    plain = json.loads(REPORT.to_json())
    assert plain["findings"][0]["evidence"]["loss"] == "nan"
    assert plain["coverage"][2] == {
        "code": "LS101",
        "name": "repeated-overflow",
        "state": UNOBSERVABLE,
        "detail": "no loss scaler in use",
        "checks": 0,
    }
    assert Report.from_dict(plain).to_dict() == REPORT.to_dict()
    assert Report.from_dict(json.loads(Report().to_json())) == Report()


def test_the_worst_headline():
    assert Report().worst is None
    assert REPORT.worst is Severity.ERROR
    assert [REPORT.exceeds(level) for level in (Severity.WARNING, Severity.ERROR, Severity.FATAL)] == [True, True, False]
    assert not Report().exceeds(Severity.INFO)


@pytest.mark.parametrize("broken", [{}, {"status": "finished"}, {**REPORT.to_dict(), "steps": "many"}])
def test_what_is_no_report_is_refused(broken):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Report.from_dict(broken)

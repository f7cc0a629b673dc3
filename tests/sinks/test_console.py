import copy
import io
import os
import pickle
import sys

import pytest

from tests.recorded import LoudGradient, changed, ended, finding, judged, parameters, plan, run, selection
from trainvet.finding import Severity
from trainvet.integrations.console import MOST, ConsoleSink
from trainvet.report import CHECKED, NO_DATA, UNOBSERVABLE, Coverage, Report
from trainvet.statistics import Snapshot


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def told(sink, *findings, **more):
    sink.write(Snapshot(0, 0), findings)
    sink.report(0, Report(findings=findings, **more))


@pytest.fixture(params=[io.StringIO, Terminal], ids=["file", "terminal"])
def stream(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    return request.param()


def test_a_new_headline_is_one_line_at_once_and_told_once(stream):
    sink = ConsoleSink(None, stream)
    warning = finding("GR101", Severity.WARNING, step=12, message="it grew", subjects=("a.weight",))
    told(sink, warning)
    assert "GR101 loud-gradient  step 12  a.weight: it grew" in stream.getvalue()
    once = stream.getvalue()
    told(sink, warning)
    sink.report(13, Report(findings=(warning,)))
    assert stream.getvalue() == once


def test_information_consequences_and_old_findings_are_not_told_at_once(stream):
    sink = ConsoleSink(None, stream)
    told(sink, finding(severity=Severity.INFO))
    effect = finding("WT105", step=5)
    sink.write(Snapshot(0, 0), [effect])
    sink.report(0, Report(findings=(finding(consequences=(effect,)),)))
    assert stream.getvalue() == ""


def test_names_are_neither_markup_nor_control_codes(stream):
    sink = ConsoleSink(None, stream)
    odd = finding()
    told(sink, odd)
    sink.report(9, ended(odd))
    text = stream.getvalue()
    assert "[red]x[/red]" in text, "shown as it is"
    assert "<script>" in text
    assert "\x1b[31mx" not in text
    assert "\ufffd[31m" in text, "the escape character is a visible mark"
    assert "\u202e" not in text


def test_the_end_shows_ten_findings_what_was_checked_and_where_the_rest_is(stream, tmp_path):
    findings = tuple(finding(f"AA{number:03}", Severity.WARNING, step=number, message=f"message {number}") for number in range(14))
    coverage = (
        Coverage("GR101", "x", CHECKED, "", 7),
        Coverage("AC101", "y", UNOBSERVABLE, "no activations here"),
        Coverage("AC102", "z", UNOBSERVABLE, "no activations here"),
        Coverage("LS101", "w", NO_DATA),
    )
    sink = ConsoleSink(tmp_path / "trainvet", stream)
    sink.report(9, ended(*findings, coverage=coverage, cost={"seconds": 1.0, "share": 0.01}, notes=("watched: all",)))
    text = stream.getvalue()
    assert "First cause: AA000" in text
    assert f"message {MOST - 1}" in text
    assert f"message {MOST}" not in text
    assert "and 4 more findings" in text
    assert "checked: GR101" in text
    assert "not observable: AC101, AC102 (no activations here)" in text
    assert "no data: LS101" in text
    assert "cost: 1 s" in text
    assert "note: watched: all" in text
    assert "tensorboard --logdir " in text
    shown = text
    sink.report(9, ended(*findings))
    sink.close()
    assert stream.getvalue() == shown


def test_a_run_without_data_is_not_shown_as_a_good_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    green = "\x1b[32m"
    outputs = {}
    for state in (NO_DATA, CHECKED):
        stream = Terminal()
        ConsoleSink(None, stream).report(9, ended(coverage=(Coverage("GR101", "x", state),)))
        outputs[state] = stream.getvalue()
    assert green in outputs[CHECKED]
    assert green not in outputs[NO_DATA]
    assert "0 of 1 rules had the evidence" in outputs[NO_DATA]


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    sink = ConsoleSink(None, stream)
    told(sink, finding(message="it grew"))
    sink.report(9, ended(finding(message="it grew")))
    assert stream.getvalue().count("it grew") == 2
    assert "\x1b" not in stream.getvalue()


def test_a_stream_that_cannot_show_a_character_still_shows_the_rest():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleSink(None, stream).report(9, ended(finding(message="‖update‖ grew")))
    assert b"?update? grew" in raw.getvalue()


def test_no_stream_at_all(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    sink = ConsoleSink(None)
    told(sink, finding())
    sink.report(9, ended(finding()))


def test_copies_and_forks_are_silent():
    stream = io.StringIO()
    sink = ConsoleSink(None, stream)
    for twin in (pickle.loads(pickle.dumps(ConsoleSink(None))), copy.deepcopy(ConsoleSink(None))):
        twin._stream = stream
        told(twin, finding())
        twin.report(9, ended(finding()))
    sink._pid = os.getpid() + 1
    told(sink, finding())
    sink.report(9, ended(finding()))
    assert stream.getvalue() == ""


def test_in_a_run_the_monitor_drives_it():
    stream = io.StringIO()
    items = [changed(item, "gradient.norm", parameters(6)[1], 25.0) if item.step in (10, 20) else item for item in run(30)]
    monitor = judged(items, plan(), selection(LoudGradient()), [ConsoleSink(None, stream)])
    assert stream.getvalue().count("trainvet ERROR: ZZ901") == 1, "the second one is folded under the first"
    monitor.end()
    assert monitor.errors == []
    assert "then: ZZ901 loud-gradient step 20" in stream.getvalue()

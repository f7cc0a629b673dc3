import json
import os

import pytest

from tests.recorded import LoudGradient, changed, ended, finding, judged, parameters, plan, run, selection
from trainvet.finding import Severity
from trainvet.integrations.jsonl import FILE, JsonLinesSink, latest, read_lines
from trainvet.report import Coverage
from trainvet.statistics import Snapshot


def lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("ascii").splitlines()]


def test_a_run_is_a_start_findings_and_an_end(tmp_path):
    items = [changed(item, "gradient.norm", parameters(6)[1], 25.0) if item.step == 10 else item for item in run(30)]
    monitor = judged(items, plan(), selection(LoudGradient()), [JsonLinesSink(tmp_path)], {"seed": 7, "odd": float("inf"), "x": object()})
    assert [record["record"] for record in lines(tmp_path / FILE)] == ["start", "finding"], "findings are there before the end"
    monitor.own_seconds, monitor.run_seconds = 0.5, float("nan")
    monitor.end()
    assert monitor.errors == []
    start, told, end = lines(tmp_path / FILE)
    assert (start["v"], start["step"], start["environment"]["odd"]) == (1, 0, "inf")
    assert {"code", "severity", "step", "first_step", "subjects", "message", "evidence", "mute"} <= told.keys()
    assert (end["status"], end["steps"], len(end["findings"]), len(end["coverage"])) == ("finished", 30, 1, 1)
    back_start, back_findings, back_end, notes = read_lines(tmp_path / FILE)
    assert back_start == start
    assert [item.to_dict() for item in back_findings] == [item.to_dict() for item in monitor.report.findings]
    assert back_end.coverage == monitor.report.coverage
    assert notes == []


def test_nan_evidence_and_odd_names_are_strict_json(tmp_path):
    sink = JsonLinesSink(tmp_path)
    sink.start(0, {"lone surrogate \ud800": "\u2028"})
    odd = finding(subjects=("a\n\ud800b",))
    sink.write(Snapshot(0, 0), [odd])
    sink.report(1, ended(odd, cost={"seconds": float("nan"), "share": 0.0}))
    sink.close()
    records = lines(tmp_path / FILE)
    assert len(records) == 3
    assert records[1]["evidence"] == {"norm": "nan"}
    assert read_lines(tmp_path / FILE)[1][0].subjects == odd.subjects


def test_a_killed_run_has_findings_and_no_end(tmp_path):
    sink = JsonLinesSink(tmp_path)
    sink.start(0, {"seed": 1})
    sink.write(Snapshot(3, 3), [finding(), finding("ZZ902", Severity.WARNING, step=2)])
    start, findings, end, _ = read_lines(tmp_path / FILE)
    assert end is None
    report = latest(start, findings)
    assert report.status == "no end record"
    assert [item.code for item in report.findings] == ["ZZ902", "ZZ901"]
    assert report.environment == {"seed": 1}


def test_resumed_and_restarted_runs(tmp_path):
    def part(step, *steps, end=True):
        sink = JsonLinesSink(tmp_path)
        sink.start(step, {"from": step})
        for found in steps:
            sink.write(Snapshot(found, found), [finding(step=found)])
        if end:
            sink.report(99, ended())
        sink.close()

    part(0, 10, 40)
    part(20, 45, end=False)
    start, findings, end, _ = read_lines(tmp_path / FILE)
    assert (start["step"], [item.step for item in findings], end) == (20, [10, 45], None)
    part(0)
    start, findings, end, _ = read_lines(tmp_path / FILE)
    assert (start["step"], findings, end.status) == (0, [], "finished")


def test_damaged_lines_are_left_out_and_a_half_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / FILE
    sink = JsonLinesSink(tmp_path)
    sink.start(0, {})
    sink.write(Snapshot(1, 1), [finding(step=1)])
    sink.close()
    with path.open("ab") as file:
        file.write(json.dumps({"record": "finding", **finding(step=2).to_dict(), "evidence": {"norm": float("nan")}}).encode())
        file.write(b'\n[1]\n"x"\n\xff\xfe\n{"record": "finding", "cod')
    sink = JsonLinesSink(tmp_path)
    sink.start(5, {})
    sink.write(Snapshot(6, 6), [finding(step=6)])
    sink.close()
    start, findings, _, notes = read_lines(path)
    assert (start["step"], [item.step for item in findings]) == (5, [1, 6])
    assert notes == [f"5 damaged lines in {FILE} were left out"]


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense\n", '{"record": "start"}\n', "[" * 100_000 + "\n"])
def test_a_file_without_a_record_is_an_error(tmp_path, text):
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no record of trainvet"):
        read_lines(path)


def test_the_end_is_written_once_and_nothing_after_close(tmp_path):
    sink = JsonLinesSink(tmp_path)
    sink.write(Snapshot(0, 0), [finding()])
    sink.start(0, {})
    sink.start(0, {})
    sink.report(1, ended())
    sink.report(1, ended())
    sink.close()
    sink.close()
    sink.write(Snapshot(2, 2), [finding()])
    assert [record["record"] for record in lines(tmp_path / FILE)] == ["start", "end"]
    assert os.listdir(tmp_path) == [FILE]


def test_a_report_comes_back_whole(tmp_path):
    report = ended(finding(evidence={"norm": 2.0}, consequences=(finding(step=9, evidence={"x": True}),)), last_good_step=3, notes=("n",))
    report = type(report)(**{**vars(report), "coverage": (Coverage("ZZ901", "loud", "checked", "", 4),), "cost": {"share": 0.25}})
    assert type(report).from_dict(json.loads(report.to_json())) == report
    with pytest.raises(KeyError):
        type(report).from_dict({})

import json
import subprocess
import sys

import pytest

from tests.recorded import LoudGradient, changed, finding, judged, parameters, plan, run, selection
from trainvet.__main__ import main
from trainvet.finding import Severity
from trainvet.integrations.jsonl import FILE, JsonLinesSink
from trainvet.integrations.tensorboard.sink import TensorBoardSink
from trainvet.rule import catalogue, defect
from trainvet.selection import choose
from trainvet.statistics import Snapshot


def recorded(directory, end=True, ratio=0.8, chosen=("all",), environment=None, files=("events", "lines")):
    """A run whose updates are too large from step 40 on, and its report."""
    items = []
    for item in run(120):
        for name in parameters(6) if item.step >= 40 else ():
            item = changed(item, "update.ratio", name, ratio)
        items.append(item)
    sinks = [sink for sink, name in ((TensorBoardSink(directory), "events"), (JsonLinesSink(directory), "lines")) if name in files]
    monitor = judged(items, plan(steps=120), selection(select=chosen) if isinstance(chosen, tuple) else chosen, sinks, environment)
    if end:
        monitor.end()
    else:
        for sink in sinks:
            sink.close()
    assert monitor.errors == []
    return monitor.report


def test_rules_lists_every_rule(capsys):
    assert main(["rules"]) == 0
    text = capsys.readouterr().out
    for code, kind in catalogue().items():
        assert f"{code}  {defect(kind)}" in text
    assert main(["rules", "--markdown"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == len(catalogue()) + 2
    assert all(line.replace("\\|", "").count("|") == 6 for line in table)
    assert all(line.split("|")[5].strip() for line in table), "each says what it checks"


@pytest.mark.parametrize("name", ["WT105", "wt105", "oversized-update", "oversized_update"])
def test_rule_explains(name, capsys):
    assert main(["rule", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# WT105 oversized-update")
    assert "## What it checks" in text
    assert "## Settings" in text


@pytest.mark.parametrize("files", [("events", "lines"), ("events",), ("lines",)])
def test_report_prints_the_runs_own_report(tmp_path, capsys, files):
    report = recorded(tmp_path / "version_0" / "trainvet", files=files)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == report.to_text()
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(report.to_json())


def test_fail_on(tmp_path, capsys):
    report = recorded(tmp_path)
    assert report.worst is Severity.WARNING
    assert [main([command, str(tmp_path), "--fail-on", level]) for command in ("report", "check") for level in ("warning", "error", "fatal")] == [
        1,
        0,
        0,
        1,
        0,
        0,
    ]
    recorded(tmp_path / "good", ratio=1e-3)
    assert main(["report", str(tmp_path / "good"), "--fail-on", "warning"]) == 0


@pytest.mark.parametrize("files", [("events", "lines"), ("events",), ("lines",)])
def test_a_run_without_an_end_is_never_called_good(tmp_path, capsys, files):
    recorded(tmp_path / "bad", end=False, files=files)
    recorded(tmp_path / "quiet", end=False, ratio=1e-3, files=files)
    for name, code in (("bad", 1), ("quiet", 0)):
        assert main(["report", str(tmp_path / name), "--fail-on", "warning"]) == code
        text = capsys.readouterr().out
        assert "no end record: the run was killed or is still going" in text
        assert "No warnings" not in text
        assert "what was checked is told at the end only" in text
        assert ("120 steps are recorded" if "events" in files else "how far it got is not recorded") in text
        assert ("WT105" in text) == (name == "bad")
    assert main(["report", str(tmp_path / "quiet"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "no end record"


def test_check_reproduces_the_findings_of_the_run(tmp_path, capsys):
    report = recorded(tmp_path)
    assert report.findings
    assert main(["check", str(tmp_path), "--select", "all", "--json"]) == 0
    out = capsys.readouterr()
    again = json.loads(out.out)
    assert again["findings"] == json.loads(report.to_json())["findings"]
    assert again["coverage"] == json.loads(report.to_json())["coverage"]
    assert "the same 1 finding as in the run" in out.err


def test_check_tries_other_settings_and_rules(tmp_path, capsys):
    recorded(tmp_path)
    command = ["check", str(tmp_path), "--fail-on", "warning"]
    assert main([*command, "--settings", '{"oversized-update": {"median": 0.9, "single": 0.9}}']) == 0
    assert "found in the run, not now: WT105" in capsys.readouterr().out
    file = tmp_path / "settings.json"
    file.write_text('{"WT105": {"median": 0.5}}')
    assert main([*command, "--settings", str(file)]) == 1
    assert main([*command, "--ignore", "oversized-update"]) == 0
    assert main([*command, "--select", "NF"]) == 0
    assert "found now, not in the run" not in capsys.readouterr().out


def test_check_uses_what_the_run_was_started_with(tmp_path, capsys):
    own = LoudGradient(limit=1e9)
    chosen = choose(("WT105", "NF101@encoder.*"), ("WT105@encoder.layers.0.*",), {"WT105": {"median": 0.9, "single": 0.79}}, rules=(own,))
    report = recorded(tmp_path, chosen=chosen)
    assert [(item.code, len(item.subjects)) for item in report.findings] == [("WT105", 4)]
    assert main(["check", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr()
    again = json.loads(out.out)
    assert [item["code"] for item in again["coverage"]] == ["WT105", "NF101"]
    assert again["findings"] == json.loads(report.to_json())["findings"]
    assert "the same 1 finding as in the run" in out.err
    assert "not run again, because they are the run's own: loud-gradient" in out.err
    for more in (["--select", "NF"], ["--ignore", "WT105"], ["--settings", '{"WT105": {"single": 0.9}}']):
        assert main(["check", str(tmp_path), "--fail-on", "warning", *more]) == 0


@pytest.mark.parametrize(
    "odd", [3, {"select": 3, "settings": [], "ignore": "x", "profile": [9], "own": 4}, {"select": ["WT999", "WT105"], "settings": {"WT105": 1}}]
)
def test_odd_arguments_in_a_file_are_no_traceback(tmp_path, odd):
    recorded(tmp_path, environment={"arguments": odd})
    assert main(["check", str(tmp_path)]) == 0


def test_check_of_an_unfinished_run_says_so(tmp_path, capsys):
    recorded(tmp_path, end=False)
    assert main(["check", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no end record" in text
    assert "checked: " in text


def test_names_from_files_do_not_reach_the_terminal_as_control_codes(tmp_path, capsys):
    sink = JsonLinesSink(tmp_path)
    sink.start(0, {})
    sink.write(Snapshot(1, 1), [finding()])
    sink.close()
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\ufffd[31m" in text


def bad_inputs(tmp_path):
    recorded(tmp_path / "a")
    recorded(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / FILE).write_text("{}\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.out.tfevents.1.x").write_bytes(b"\0" * 100)
    one = str(tmp_path / "a")
    return {
        "does not exist": ["report", str(tmp_path / "nowhere")],
        "is not a directory": ["report", str(tmp_path / "lines" / FILE)],
        "no run of trainvet in": ["report", str(tmp_path / "empty")],
        "no run of trainvet": ["check", str(tmp_path / "other")],
        "holds no record": ["report", str(tmp_path / "lines")],
        "holds no event file": ["check", str(tmp_path / "lines")],
        f"name one of them:\n  {one}": ["report", str(tmp_path)],
        "unknown rule 'WT999'": ["check", one, "--select", "WT999"],
        "did you mean dead-relu": ["rule", "dead-rely"],
        "unknown rule 'oversized-updat'": ["check", one, "--ignore", "oversized-updat"],
        "has no setting 'mediam'; did you mean median": ["check", one, "--settings", '{"WT105": {"mediam": 1}}'],
        "is not JSON": ["check", one, "--settings", "{"],
        "neither a JSON object nor a readable file": ["check", one, "--settings", "nowhere.json"],
        "object of objects": ["check", one, "--settings", '{"WT105": 1}'],
        "must be of the same kind": ["check", one, "--settings", '{"WT105": {"median": "x"}}'],
    }


def test_bad_input_is_one_clear_sentence(tmp_path, capsys):
    for says, command in bad_inputs(tmp_path).items():
        assert main(command) == 2, command
        out = capsys.readouterr()
        assert out.out == ""
        assert out.err.startswith("trainvet: ")
        assert says in out.err


def test_as_a_program_it_loads_no_framework_and_stops_quietly_in_a_pipe(tmp_path):
    recorded(tmp_path)
    code = (
        "import sys\nfrom trainvet.__main__ import main\n"
        "codes = [main(['rules']), main(['report', sys.argv[1]]), main(['check', sys.argv[1]])]\n"
        "print(codes, [name for name in ('torch', 'tensorflow', 'keras', 'jax', 'lightning', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"
    piped = subprocess.run(f"{sys.executable} -m trainvet report {tmp_path} | true", shell=True, capture_output=True, text=True, timeout=60)
    assert piped.stderr == ""
    wrong = subprocess.run([sys.executable, "-m", "trainvet", "report"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "LOGDIR" in wrong.stderr

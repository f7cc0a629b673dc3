import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.recorded import LoudGradient, changed, ended, finding, judged, only, parameters, plan, run, same, selection, snapshot
from trainvet.finding import Severity
from trainvet.integrations.tensorboard import values
from trainvet.integrations.tensorboard.event_file import records
from trainvet.integrations.tensorboard.journal import BUDGET, BUDGET_PER_STEP, Journal
from trainvet.integrations.tensorboard.reader import read
from trainvet.integrations.tensorboard.sink import TensorBoardSink
from trainvet.monitor import Monitor
from trainvet.report import Report
from trainvet.rule import Rule

EVENTS = pytest.importorskip("tensorboard.compat.proto.event_pb2")

# TensorBoard's own reader, in a process where TensorFlow cannot be imported: quick, and the way most people run it
READS = """
import sys, json
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
held = EventAccumulator(sys.argv[1], size_guidance={"tensors": 0}); held.Reload()
out = {}
for tag in held.Tags()["tensors"]:
    data = held.summary_metadata[tag]
    points = []
    for point in held.Tensors(tag):
        array = tensor_util.make_ndarray(point.tensor_proto)
        plain = [item.decode('latin-1') for item in array.ravel()] if array.dtype == object else array.ravel().tobytes().hex()
        points.append([point.step, list(array.shape), plain])
    out[tag] = {"plugin": data.plugin_data.plugin_name, "content": data.plugin_data.content.decode(), "class": data.data_class, "points": points}
print(json.dumps(out))
"""


def tensorboard_reads(directory):
    done = subprocess.run([sys.executable, "-c", READS, str(directory)], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def events(directory):
    return [EVENTS.Event.FromString(data) for path in sorted(directory.iterdir()) for data in records(path)]


def spoilt_run(tmp_path, steps=60):
    names = parameters(6)
    items = [changed(item, "gradient.norm", names[1], 25.0) if item.step in (1, 30) else item for item in run(steps)]
    sink = TensorBoardSink(tmp_path)
    monitor = judged(items, plan(steps=steps), selection(LoudGradient()), [sink], {"seed": 7, "odd": float("nan")})
    monitor.end()
    assert monitor.errors == []
    return items, monitor


def test_tensorboard_reads_every_tag_and_sorts_it_to_its_dashboard(tmp_path):
    items, monitor = spoilt_run(tmp_path)
    read_back = tensorboard_reads(tmp_path)
    ours = {tag for tag, entry in read_back.items() if entry["plugin"] == "trainvet"}
    assert ours == {f"trainvet/{name}" for name in ("schema", "environment", "facts", "stats", "series", "snapshot", "findings", "end")}
    for tag in ours:
        assert (read_back[tag]["content"], read_back[tag]["class"]) == ('{"v":1}', 2)
    texts = {tag for tag, entry in read_back.items() if entry["plugin"] == "text"}
    assert texts == {"trainvet/report", "trainvet/environment_text", "trainvet/layers"}
    scalars = {tag.removeprefix("trainvet/") for tag, entry in read_back.items() if entry["plugin"] == "scalars"}
    assert scalars == {
        *(f"grad_norm/{name}" for name in ("total", "max_layer")),
        *(f"update_ratio/{name}" for name in ("p05", "median", "p95")),
        *(f"findings/{name}" for name in ("warning", "error", "fatal")),
        *("dead_fraction/max", "saturated_fraction/max", "nonfinite/count", "overflow/rate", "loss", "lr/group_0", "lr_schedule/group_0"),
    }
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = read_back["custom_scalars__config__"]
    assert layout["plugin"] == "custom_scalars"
    charts = layout_pb2.Layout.FromString(layout["points"][0][2][0].encode("latin-1")).category[0].chart
    for chart in charts:
        lines = chart.multiline.tag or [chart.margin.series[0].value]
        assert chart.title.startswith("loss scale") or any(re.match(line, f"trainvet/{name}") for line in lines for name in scalars), chart.title
    for tag, entry in read_back.items():
        steps = [point[0] for point in entry["points"]]
        assert steps == sorted(set(steps)), f"steps of {tag} do not grow strictly: {steps}"
    assert [point[0] for point in read_back["trainvet/stats"]["points"]] == [item.step for item in items]
    assert read_back["trainvet/stats"]["points"][0][1] == [9, 17]
    (environment,) = read_back["trainvet/environment"]["points"]
    held = json.loads(environment[2][0])
    assert (held["seed"], held["odd"], held["arguments"]["own"]) == (7, "nan", ["loud-gradient"])
    told = [json.loads(text) for point in read_back["trainvet/findings"]["points"] for text in point[2]]
    assert [(item["code"], item["step"]) for item in told] == [("ZZ901", 1), ("ZZ901", 30)]
    end = json.loads(read_back["trainvet/end"]["points"][-1][2][0])
    assert (end["status"], end["matrices"], end["matrices_thinned"], end["dropped"]) == ("finished", len(items), 0, 0)
    assert end["report"] == json.loads(json.dumps(values_of(monitor.report)))


def values_of(report):
    from trainvet.recording import jsonable

    return jsonable(report.to_dict())


def test_one_event_holds_a_report_and_the_file_starts_with_start(tmp_path):
    items, _ = spoilt_run(tmp_path)
    told = events(tmp_path)
    assert told[0].file_version == "brain.Event:2"
    assert told[1].session_log.status == EVENTS.SessionLog.START
    by_step = {}
    for event in told:
        for value in event.summary.value:
            if value.tag in ("trainvet/stats", "trainvet/findings", "trainvet/report", "trainvet/loss"):
                by_step.setdefault(event.step, []).append(id(event))
    assert len(set(by_step[30])) == 1
    assert len(by_step[30]) == 4
    first = [value for event in told for value in event.summary.value if value.tag == "trainvet/stats"]
    assert [bool(value.metadata.plugin_data.plugin_name) for value in first] == [True] + [False] * (len(items) - 1)


class Static(Rule):
    """Finds something before the first step."""

    code = "ZZ902"
    severity = Severity.WARNING

    def begin(self, facts):
        """At once."""
        yield self.finding(0, "found in the plan", subjects=("x",))

    def end(self, step):
        """And at the end."""
        yield self.finding(step, "found at the end", subjects=("y",))


def test_findings_of_the_plan_and_of_the_first_step_do_not_share_a_step_in_one_tag(tmp_path):
    items = [changed(item, "gradient.norm", parameters(6)[1], 25.0) if item.step == 0 else item for item in run(5)]
    sink = TensorBoardSink(tmp_path)
    judged(items, plan(), selection(LoudGradient(), Static()), [sink]).end()
    steps = [(event.step, value.tag) for event in events(tmp_path) for value in event.summary.value]
    assert len(steps) == len(set(steps))
    recording = read(tmp_path)
    assert [(item.code, item.step) for item in recording.findings] == [("ZZ902", 0), ("ZZ901", 0), ("ZZ902", 5)]
    assert [item.step for item in recording.snapshots] == [item.step for item in items]


def test_aggregates_are_those_of_the_numbers(tmp_path):
    held = changed(snapshot(0, np.random.default_rng(1), rows=1, skipped=[0]), "gradient.norm", parameters(6)[0], float("nan"))
    held = changed(held, "weight.nan", parameters(6)[0], 3.0)
    held = changed(held, "update.ratio", parameters(6)[0], float("nan"))
    held = changed(held, "activation.dead_share", "encoder.layers.1.act", 0.75)
    from trainvet.integrations.tensorboard.scalars import Aggregates

    aggregates = Aggregates()
    aggregates.add(held)
    out = {tag.removeprefix("trainvet/"): number for tag, number in aggregates.of(held).items()}
    ratios = held.tables["update"].columns["ratio"][1:]
    assert np.isnan(out["grad_norm/max_layer"])
    assert out["grad_norm/total"] == held.series["run.gradient_norm"]["run"].values[-1]
    np.testing.assert_allclose([out[f"update_ratio/{name}"] for name in ("p05", "median", "p95")], np.quantile(ratios, [0.05, 0.5, 0.95]))
    assert (out["nonfinite/count"], out["dead_fraction/max"], out["overflow/rate"], out["lr/group_0"]) == (3.0, 0.75, 1.0, 1e-3)
    bare = Aggregates()
    assert bare.of(type(held)(0, 0)) == {}, "nothing measured, nothing drawn"


def test_odd_names_break_no_tag_and_no_markdown(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.start(0, {"a|b": "<script>alert(1)</script>\n# big", "`x`": {"y": "**z**"}})
    odd = finding()
    held = next(run(1))
    sink.write(held, [odd])
    sink.report(0, Report(findings=(odd,)))
    sink.report(1, ended(odd))
    sink.close()
    for event in events(tmp_path):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "text" or value.tag == "trainvet/report":
                text = value.tensor.string_val[0].decode()
                assert [part for part in ("<script", "**z**", "`fast`", "\x1b", "\u202e", "a|b") if part in text] == []
                assert "\n# big" not in text
    assert values.tag("lr", "my group/±|<b>") == "trainvet/lr/my_group____b_"
    report = [value for event in events(tmp_path) for value in event.summary.value if value.tag == "trainvet/report"]
    assert "&#124;" in report[-1].tensor.string_val[0].decode()


def test_tables_keep_their_columns_when_rendered(tmp_path):
    markdown = pytest.importorskip("markdown")
    from trainvet.integrations.tensorboard.text import layers_text, report_text
    from trainvet.report import Coverage
    from trainvet.statistics import Facts, Subject

    facts = Facts(subjects=(Subject("a|b.w`", "parameter", "a|b", "Lin`<i>", shape=(3, 2)),))
    html = markdown.markdown(layers_text(facts, {"a|b.w`": 0.0}), extensions=["markdown.extensions.tables"])
    assert html.count("<td>") == 6
    assert "<i>" not in html
    assert "<td>no</td>" in html
    deep = [Subject(name, "parameter", name, depth=depth) for name, depth in (("unknown", -1), ("last", 7), ("first", 0))]
    rows = layers_text(Facts(subjects=tuple(deep)), {}).splitlines()[4:]
    assert [row.split("|")[1].strip() for row in rows] == ["first", "last", "unknown"]
    assert all(row.endswith("| not measured |") for row in rows)
    report = report_text(ended(finding(), coverage=(Coverage("AC101", "dead|relu", "not observable", "a|`b`"),)))
    html = markdown.markdown(report, extensions=["markdown.extensions.tables"])
    assert html.count("<td>") == 3
    assert "<code>" not in html
    assert "<script>" not in html


def test_a_text_is_bounded_whatever_is_found():
    from trainvet.integrations.tensorboard.text import MOST_CHARACTERS, report_text

    text = report_text(ended(*(finding(step=step, message="*" * 5000) for step in range(50))))
    assert MOST_CHARACTERS * 0.6 < len(text) < MOST_CHARACTERS * 1.01
    assert text.endswith("more lines were cut\n")


def test_a_small_run_keeps_all_and_stays_under_three_megabytes(tmp_path):
    journal = Journal(tmp_path)
    journal.start(0, {}, 0.0)
    journal.facts(0, plan(100, steps=1000), 0.0)
    for item in run(1000, count=100, every=16, dense=10):
        journal.write(item.step, item, (), None, 0.0)
    journal.report(1000, ended(), 0.0)
    journal.close()
    assert (journal.thinned, journal.matrices) == (0, 73)
    assert only(tmp_path).stat().st_size < 1_500_000


def test_matrices_of_a_large_run_are_thinned_and_that_is_said(tmp_path):
    journal = Journal(tmp_path)
    journal.start(0, {}, 0.0)
    journal.facts(0, plan(1200, steps=1000), 0.0)
    last = None
    for item in run(1000, count=1200, every=16, dense=10):
        journal.write(item.step, item, (), None, 0.0)
        last = item
    journal.write(1000, snapshot(1000, np.random.default_rng(0), count=1200), [finding(step=1000)], None, 0.0)
    journal.report(1001, ended(), 0.0)
    journal.close()
    assert only(tmp_path).stat().st_size < BUDGET + BUDGET_PER_STEP * 1001 + 500_000
    assert 10 < journal.thinned < 65
    recording = read(tmp_path)
    assert recording.thinned == journal.thinned
    assert recording.snapshots[-1].tables, "a snapshot with a finding keeps its numbers"
    with_tables = [item.step for item in recording.snapshots if item.tables]
    assert max(np.diff(with_tables)) < 200, "what is kept is spread over the run"
    assert same(recording.snapshots[-2], last) or not recording.snapshots[-2].tables
    schema = [json.loads(value.tensor.string_val[0]) for event in events(tmp_path) for value in event.summary.value if value.tag == "trainvet/schema"]
    assert schema[0]["matrices_thinned"] == 0
    assert schema[-1]["matrices_thinned"] == 1
    assert "left out" in schema[-1]["thinning"]


def test_points_are_bounded_over_a_very_long_run(tmp_path, monkeypatch):
    monkeypatch.setattr("trainvet.integrations.tensorboard.journal.MATRICES", 16)
    journal = Journal(tmp_path)
    journal.start(0, {}, 0.0)
    rng = np.random.default_rng(0)
    for step in range(0, 4000, 10):
        journal.write(step, snapshot(step, rng, count=2), (), None, 0.0)
    assert journal.matrices < 16 * 6
    assert journal.matrices + journal.thinned == 400


def test_the_plan_may_change_during_the_run(tmp_path):
    sink = TensorBoardSink(tmp_path)
    monitor = Monitor(selection(LoudGradient()), sinks=[sink])
    items = list(run(40, count=4)), list(run(80, count=8))
    monitor.begin(plan(4))
    for item in items[0]:
        monitor.observe(item)
    monitor.begin(plan(8), 40)
    later = [item for item in items[1] if item.step >= 40]
    for item in later:
        monitor.observe(item)
    monitor.end()
    assert monitor.errors == []
    recording = read(tmp_path)
    assert [(moment[0], len(moment[1].subjects)) for moment in recording.moments if isinstance(moment, tuple)] == [(0, 6), (40, 12)]
    assert all(same(left, right) for left, right in zip(recording.snapshots, [*items[0], *later], strict=True))


def test_importing_the_sink_loads_no_framework():
    code = (
        "import sys, trainvet.integrations.tensorboard.sink, trainvet.integrations.jsonl, trainvet.integrations.tensorboard.reader\n"
        "import trainvet.__main__\n"
        "print([name for name in ('tensorflow', 'torch', 'jax', 'keras', 'lightning', 'rich', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

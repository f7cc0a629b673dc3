import dataclasses
import json
import os
import struct

import numpy as np
import pytest

from tests.recorded import LoudGradient, changed, ended, finding, judged, only, parameters, plan, run, same, selection
from trainvet.integrations.tensorboard import values
from trainvet.integrations.tensorboard.crc32c import masked
from trainvet.integrations.tensorboard.event_file import DamagedError, EventFile, frame, records
from trainvet.integrations.tensorboard.layout import meta
from trainvet.integrations.tensorboard.reader import find_runs, holds_run, read
from trainvet.integrations.tensorboard.sink import TensorBoardSink
from trainvet.monitor import Monitor
from trainvet.statistics import Snapshot


def write_run(directory, steps=50, start=0, end=True, facts=None, environment=None):
    items = [changed(item, "gradient.norm", parameters(6)[1], 25.0) if item.step in (1, 30) else item for item in run(steps) if item.step >= start]
    sink = TensorBoardSink(directory)
    monitor = Monitor(selection(LoudGradient()), sinks=[sink], environment=environment or {"seed": 1})
    monitor.begin(facts or plan(steps=steps), start)
    for item in items:
        monitor.observe(item)
    if end:
        monitor.end()
    else:
        sink.close()
    assert monitor.errors == []
    return items, monitor


def test_a_run_comes_back(tmp_path):
    items, monitor = write_run(tmp_path)
    recording = read(tmp_path)
    assert all(same(left, right) for left, right in zip(recording.snapshots, items, strict=True))
    assert dataclasses.replace(recording.facts, schedules=()) == dataclasses.replace(plan(steps=50), schedules=())
    np.testing.assert_array_equal(recording.facts.schedules[0].curve, plan(steps=50).schedules[0].curve)
    assert recording.environment["seed"] == 1
    told = [dataclasses.replace(item, consequences=()) for head in monitor.report.findings for item in (head, *head.consequences)]
    assert list(recording.findings) == told
    assert recording.end == monitor.report
    assert recording.notes == ()


def test_a_run_without_an_end_has_none(tmp_path):
    items, _ = write_run(tmp_path, end=False)
    recording = read(tmp_path)
    assert recording.end is None
    assert len(recording.snapshots) == len(items)


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path):
    first, _ = write_run(tmp_path, steps=50)
    second, _ = write_run(tmp_path, steps=80, start=25)
    recording = read(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    steps = [item.step for item in recording.snapshots]
    assert steps == [item.step for item in first if item.step < 25] + [item.step for item in second]
    assert same(recording.snapshots[-1], second[-1])
    assert (recording.start, [item.step for item in recording.findings]) == (25, [1, 30])
    assert len([moment for moment in recording.moments if not isinstance(moment, Snapshot)]) == 2


def test_a_run_that_starts_again_replaces_the_one_before(tmp_path):
    write_run(tmp_path, steps=50)
    items, _ = write_run(tmp_path, steps=20, end=False, environment={"seed": 2})
    recording = read(tmp_path)
    assert [item.step for item in recording.snapshots] == [item.step for item in items]
    assert recording.end is None
    assert recording.environment["seed"] == 2
    assert [item.step for item in recording.findings] == [1]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9, 13, 100])
def test_a_cut_off_last_record_loses_only_itself(tmp_path, cut):
    items, _ = write_run(tmp_path, end=False)
    path = only(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    recording = read(tmp_path)
    assert [item.step for item in recording.snapshots] == [item.step for item in items[:-1]]
    assert recording.notes == ()


def test_a_flipped_bit_ends_the_file_and_is_said(tmp_path):
    items, _ = write_run(tmp_path, end=False)
    path = only(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)
    recording = read(tmp_path)
    assert 0 < len(recording.snapshots) < len(items)
    assert "was not read" in recording.notes[0]


def test_a_record_longer_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "events.out.tfevents.1.x"
    header = struct.pack("<Q", 1 << 40)
    path.write_bytes(header + struct.pack("<I", masked(header)) + b"x" * 20)
    with pytest.raises(DamagedError, match="over the limit"):
        list(records(path))
    with pytest.raises(ValueError, match="holds no event file of trainvet"):
        read(tmp_path)


def test_other_peoples_event_files_hold_no_run(tmp_path):
    file = EventFile(tmp_path)
    file.write(values.version(0.0))
    file.write(values.event(0, 0.0, {"loss": values.scalar(1.0)}, set()))
    file.close()
    assert not holds_run(tmp_path)
    with pytest.raises(ValueError, match="holds no event file of trainvet"):
        read(tmp_path)
    with pytest.raises(ValueError, match="holds no event file"):
        read(tmp_path.parent / tmp_path.name / "..")


def test_runs_are_found_below_a_directory(tmp_path):
    for name in ("b/trainvet", "a/version_0/trainvet"):
        write_run(tmp_path / name, steps=3)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events.out.tfevents.1.x").write_bytes(b"nonsense")
    assert find_runs(tmp_path) == [tmp_path / "a/version_0/trainvet", tmp_path / "b/trainvet"]


def hostile(directory, **tags):
    file = EventFile(directory)
    file.write(values.version(0.0))
    file.write(values.session_start(0, 0.0))
    environment = {"trainvet/environment": values.strings(['{"seed": 1}'])}
    for step, told in enumerate([environment, *({f"trainvet/{tag}": value} for tag, value in tags.items())]):
        file.write(values.event(step, 0.0, told, set()))
    file.close()


@pytest.mark.parametrize(
    "tags",
    [
        {"facts": values.strings(["{"])},
        {"facts": values.strings(['{"v": 1, "facts": {"subjects": 3}}'])},
        {"facts": values.strings(['{"v": 9, "facts": {}}'])},
        {"facts": values.strings(["[" * 100_000])},
        {"facts": values.array(np.zeros(3))},
        {"schema": values.strings(['{"v": 1}'])},
        {"schema": values.strings([])},
        {"snapshot": values.array(np.zeros(4))},
        {"snapshot": values.array(np.full(9, np.inf))},
        {"snapshot": values.strings(["x"])},
        {"findings": values.strings(['{"code": "X"}', "null"])},
        {"findings": values.strings(['{"code":1,"name":2,"severity":3}'])},
        {"end": values.strings(['{"report": {"findings": {}}}'])},
    ],
    ids=lambda tags: next(iter(tags)),
)
def test_nonsense_is_left_out_and_said(tmp_path, tags):
    hostile(tmp_path, **tags)
    recording = read(tmp_path)
    assert (recording.moments, recording.findings, recording.end) == ((), (), None)
    assert len(recording.notes) == 1


def test_steps_that_do_not_grow_are_left_out(tmp_path):
    file = EventFile(tmp_path)
    file.write(values.version(0.0))
    file.write(values.session_start(0, 0.0))
    for index, step in enumerate((4, 5, 5, 3, 6)):
        file.write(values.event(index, 0.0, {"trainvet/snapshot": values.array(meta(Snapshot(step, step), 0, 0, 0))}, set()))
    file.close()
    recording = read(tmp_path)
    assert [item.step for item in recording.snapshots] == [4, 5, 6]
    assert len(recording.notes) == 2


def test_a_tensor_that_lies_about_its_size_is_refused():
    value = values.array(np.zeros((2, 3), np.float32))
    value.tensor.tensor_shape.dim[0].size = 1 << 40
    with pytest.raises(ValueError, match="do not fill the shape"):
        values.read_array(value)
    value.tensor.tensor_shape.dim[0].size = -1
    with pytest.raises(ValueError, match="not a float tensor"):
        values.read_array(value)


def test_evidence_and_texts_of_findings_survive(tmp_path):
    odd = finding()
    sink = TensorBoardSink(tmp_path)
    sink.start(0, {})
    sink.write(Snapshot(3, 3), [odd])
    sink.report(4, ended(odd))
    sink.close()
    (back,) = read(tmp_path).findings
    assert back.message == odd.message
    assert back.subjects == odd.subjects
    assert np.isnan(back.evidence["norm"])


def test_a_file_name_sorts_by_age_and_framing_is_tensorboards(tmp_path):
    names = []
    for _ in range(12):
        file = EventFile(tmp_path)
        names.append(file.path.name)
        file.close()
    assert names == sorted(names)
    assert names[0].startswith("events.out.tfevents.")
    assert frame(b"ab")[8:12] == struct.pack("<I", masked(struct.pack("<Q", 2)))


def test_judged_again_from_file_gives_the_same_findings(tmp_path):
    from trainvet.recording import replay

    names = parameters(6)
    items = []
    for item in run(120):
        if item.step >= 40:
            for name in names:
                item = changed(item, "update.ratio", name, 0.7 + item.step / 1000)
        if item.step == 90:
            item = changed(changed(item, "gradient.nan", names[2], 5.0), "weight.nan", names[2], 2.0)
        items.append(item)
    facts = plan(steps=120, optimizers=(dataclasses.replace(plan().optimizers[0], parameters=names[:4]),))
    monitor = judged(items, facts, selection(select=("all",)), [TensorBoardSink(tmp_path)])
    monitor.end()
    assert monitor.errors == []
    codes = {item.code for head in monitor.report.findings for item in (head, *head.consequences)}
    assert {"NF101", "WT102", "WT105"} <= codes
    again = replay(read(tmp_path), Monitor(selection(select=("all",)), environment={"seed": 1}))
    assert json.dumps(again.to_dict(), sort_keys=True) == json.dumps(monitor.report.to_dict(), sort_keys=True)

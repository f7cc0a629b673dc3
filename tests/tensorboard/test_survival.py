"""What happens to the files when the process dies, forks, is copied, or the disk is full."""

import contextlib
import copy
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tests.recorded import changed, ended, finding, only, parameters, plan, run, snapshot
from trainvet.finding import Severity
from trainvet.integrations.append import append, open_append
from trainvet.integrations.jsonl import FILE, JsonLinesSink, read_lines
from trainvet.integrations.tensorboard import journal
from trainvet.integrations.tensorboard.event_file import EventFile, records
from trainvet.integrations.tensorboard.reader import read
from trainvet.integrations.tensorboard.sink import TensorBoardSink
from trainvet.integrations.tensorboard.writer import Background
from trainvet.report import Report
from trainvet.statistics import Snapshot


def program(body, *arguments, **more):
    code = "import sys\nfrom pathlib import Path\nfrom tests.recorded import *\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_everything_told_before_a_sigkill_can_be_read(tmp_path):
    process = program(
        """
        import time
        import numpy as np
        from trainvet.integrations.jsonl import JsonLinesSink
        from trainvet.integrations.tensorboard.sink import TensorBoardSink
        sinks = [TensorBoardSink(Path(sys.argv[1])), JsonLinesSink(Path(sys.argv[1]))]
        monitor = judged([], plan(), selection(LoudGradient()), sinks)
        rng = np.random.default_rng(0)
        for step in range(100_000):
            item = snapshot(step, rng)
            monitor.observe(changed(item, "gradient.norm", parameters(6)[0], 99.0) if step == 50 else item)
            print(step, flush=True)
            time.sleep(0.005)
        """,
        tmp_path,
    )
    for line in process.stdout:
        if int(line) == 120:
            process.send_signal(signal.SIGKILL)
            break
    told = max([120, *(int(line) for line in process.stdout if line.strip().isdigit())])
    assert process.wait(10) == -signal.SIGKILL
    process.stderr.close()
    recording = read(tmp_path)
    steps = [item.step for item in recording.snapshots]
    assert steps == list(range(len(steps)))
    assert steps[-1] >= told - 20, "only what was still in the queue is lost"
    assert [item.step for item in recording.findings] == [50]
    assert recording.end is None
    assert recording.notes == ()
    start, findings, end, notes = read_lines(tmp_path / FILE)
    assert (start["step"], [item.step for item in findings], end, notes) == (0, [50], None, [])


def test_an_ordinary_exit_without_close_loses_nothing(tmp_path):
    process = program(
        """
        from trainvet.integrations.tensorboard.sink import TensorBoardSink
        judged(run(60), plan(), selection(LoudGradient()), [TensorBoardSink(Path(sys.argv[1]))])
        """,
        tmp_path,
    )
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert len(read(tmp_path).snapshots) == len(list(run(60)))


def test_a_forked_child_writes_nothing_and_does_not_hang(tmp_path):
    process = program(
        """
        import os, time
        import numpy as np
        from trainvet.integrations.jsonl import JsonLinesSink
        from trainvet.integrations.console import ConsoleSink
        from trainvet.integrations.tensorboard.sink import TensorBoardSink
        sinks = [TensorBoardSink(Path(sys.argv[1])), JsonLinesSink(Path(sys.argv[1])), ConsoleSink(Path(sys.argv[1]))]
        monitor = judged(run(20), plan(), selection(LoudGradient()), sinks)
        rng = np.random.default_rng(0)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                assert not sinks[0]._writer.alive
                assert sinks[0]._journal._file is None, "the inherited file is closed here"
                for step in range(1000, 1400):
                    monitor.observe(changed(snapshot(step, rng), "gradient.norm", parameters(6)[0], 99.0))
                monitor.end()
                os._exit(len(monitor.errors))
            started = time.monotonic()
            assert os.waitpid(child, 0)[1] == 0
            assert time.monotonic() - started < 30
        for step in range(20, 40):
            monitor.observe(snapshot(step, rng))
        monitor.end()
        assert monitor.errors == [], monitor.errors
        """,
        tmp_path,
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "99.0" not in errors, "the child spoke"
    recording = read(tmp_path)
    steps = [item.step for item in recording.snapshots]
    assert steps == sorted({*(item.step for item in run(20)), *range(20, 40)})
    assert recording.end.status == "finished"
    assert (recording.findings, recording.notes) == ((), ())
    assert read_lines(tmp_path / FILE)[1] == []


def test_copies_and_pickles_are_closed_and_leave_the_original_alone(tmp_path):
    sinks = [TensorBoardSink(tmp_path), JsonLinesSink(tmp_path)]
    for sink in sinks:
        sink.start(0, {})
    sinks[0].facts(0, plan())
    copies = [twin for sink in sinks for twin in (copy.deepcopy(sink), pickle.loads(pickle.dumps(sink)), copy.copy(sink))]
    items = list(run(10))
    for twin in copies:
        twin.start(0, {})
        twin.write(items[0], [finding()])
        twin.report(1, ended(finding()))
        twin.close()
    for sink in sinks:
        for item in items:
            sink.write(item, [])
        sink.report(10, ended())
        sink.close()
        sink.close()
        sink.write(items[0], [finding()])
        sink.report(11, ended(finding()))
    recording = read(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert (len(recording.snapshots), recording.findings) == (len(items), ())
    assert read_lines(tmp_path / FILE)[1:3] == ([], ended())


def test_a_full_queue_drops_the_oldest_numbers_never_findings():
    gate, carried = threading.Event(), []
    background = Background(limit=8)
    background.submit(gate.wait)
    while background._calls:
        time.sleep(0.001)
    for number in range(6):
        background.submit(lambda number=number: carried.append(number), droppable=True)
    for name in "abc":
        background.submit(lambda name=name: carried.append(name))
    for number in range(6, 40):
        background.submit(lambda number=number: carried.append(number), droppable=True)
        assert len(background._calls) <= 8
    for name in "defghijkl":
        background.submit(lambda name=name: carried.append(name))
    gate.set()
    assert background.close()
    assert [item for item in carried if isinstance(item, str)] == list("abcdefghijkl")
    assert background.dropped == 40 - sum(isinstance(item, int) for item in carried)
    assert background.dropped >= 35


def test_dropped_snapshots_are_counted_in_the_end_record(tmp_path):
    sink = TensorBoardSink(tmp_path, limit=4)
    sink.start(0, {})
    gate = threading.Event()
    sink._writer.submit(gate.wait)
    items = list(run(200, every=5))
    for item in items:
        sink.write(item, [])
    gate.set()
    sink.report(200, ended())
    sink.close()
    recording = read(tmp_path)
    assert 0 < len(recording.snapshots) <= 5
    assert recording.end is not None
    assert sink._journal.dropped == len(items) - len(recording.snapshots)


def test_an_error_of_ours_is_told_to_the_monitor_once():
    background = Background()
    background.submit(lambda: 1 / 0)
    background._thread.join(5)
    with pytest.raises(RuntimeError, match="writer thread") as caught:
        background.submit(lambda: None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    background.submit(lambda: None)
    assert background.close()


def test_close_does_not_wait_for_ever():
    background = Background()
    gate = threading.Event()
    background.submit(gate.wait)
    started = time.monotonic()
    assert not background.close(timeout=0.1)
    assert time.monotonic() - started < 2
    gate.set()


def test_what_matters_is_handed_to_the_device(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    sink, lines = TensorBoardSink(tmp_path), JsonLinesSink(tmp_path)
    for each, counts in ((sink, [0, 0, 1, 2, 3]), (lines, [0, 0, 1, 2, 2])):
        synced.clear()
        each.start(0, {})
        seen = []
        for step, found in enumerate(([], [finding(severity=Severity.WARNING)], [finding(severity=Severity.ERROR)])):
            each.write(Snapshot(step, step), found)
            each.report(step, Report(findings=tuple(found)))
            settle(each)
            seen.append(len(synced))
        each.report(3, ended())
        settle(each)
        seen.append(len(synced))
        each.close()
        assert [*seen, len(synced)] == counts


def settle(sink):
    """Wait until the writer thread has carried out everything."""
    if isinstance(sink, TensorBoardSink):
        done = threading.Event()
        sink._writer.submit(done.set)
        assert done.wait(10)


def test_handing_over_costs_the_training_little(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.start(0, {})
    gate = threading.Event()
    sink._writer.submit(gate.wait)
    item = next(run(1))
    started = time.perf_counter()
    for _ in range(200):
        sink.write(item, [])
    each = (time.perf_counter() - started) / 200
    gate.set()
    sink.close()
    assert each < 200e-6


# ---- a full disk


@contextlib.contextmanager
def small_disk(path, size="256k"):
    """A real file system of 256 KiB."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("no right to mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)  # a failed test may hold files open


def test_training_outlives_a_full_disk_and_findings_arrive_when_there_is_room(tmp_path, caplog, monkeypatch):
    made = []
    monkeypatch.setattr(journal, "EventFile", lambda directory: made.append(EventFile(directory)) or made[-1])
    with small_disk(tmp_path / "disk") as disk, caplog.at_level(logging.WARNING, "trainvet"):
        (disk / "ballast").write_bytes(bytes(180_000))
        log_dir = disk / "trainvet"
        sink, lines = TensorBoardSink(log_dir, backoff=0.05), JsonLinesSink(log_dir)
        rng = np.random.default_rng(0)
        for each in (sink, lines):
            each.start(0, {"seed": 1})
            each.facts(0, plan())
        step = 0
        while sink._journal.lost < 5:
            for each in (sink, lines):
                each.write(snapshot(step, rng), [])
            step += 1
            time.sleep(0.001)
            assert step < 5000
        full_at = step
        told = finding(step=step)
        for each in (sink, lines):
            each.write(changed(snapshot(step, rng), "gradient.norm", parameters(6)[0], 99.0), [told])
            each.report(step, Report(findings=(told,)))
        for line in range(20):  # the last bytes of the disk
            lines.write(snapshot(step, rng), [finding(step=step, message=f"{line} " + "x" * 500)])
        for wait in (0.06, 0.11, 0.21):  # longer than the backoff, then several times within it
            time.sleep(wait)
            for _ in range(20):
                sink.write(Snapshot(step, step), [])
        settle(sink)
        assert 2 <= len(made) <= 5, "it is tried again, but not each time"
        assert len(list(log_dir.glob("events.out.*"))) == 1, "a file that cannot even hold its head is removed"
        time.sleep(0.5)
        (disk / "ballast").unlink()
        for later in range(step + 1, step + 20):
            for each in (sink, lines):
                each.write(snapshot(later, rng), [])
        for each in (sink, lines):
            each.report(step + 20, ended(told))
            each.close()
        recording = read(log_dir)
        files = sorted(log_dir.glob("events.out.*"))
        assert len(files) == 2
        for path in files:
            assert list(records(path)), "every file ends with a whole record"
        steps = [item.step for item in recording.snapshots]
        assert steps == sorted(steps)
        assert steps[-1] == step + 19
        assert max(np.diff(steps)) > 5, "what did not fit is gone, and so it is counted"
        assert recording.dropped == sink._journal.lost >= 5
        assert told.code in [item.code for item in recording.findings]
        assert recording.findings[0].step == full_at
        assert (recording.end.status, recording.notes) == ("finished", ())
        assert len([moment for moment in recording.moments if not isinstance(moment, Snapshot)]) == 1, "the second file repeats the plan"
        _, findings, end, notes = read_lines(log_dir / FILE)
        assert len(findings) == 21
        assert end is not None
        assert notes == []
    warned = [item for item in caplog.records if item.name == "trainvet"]
    assert len(warned) == 2, "one warning for each kind of file"


def test_a_failed_append_leaves_whole_records(tmp_path):
    path = tmp_path / "x"
    fd = open_append(path, new=True)
    append(fd, b"whole\n")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, old[1]))
        with pytest.raises(OSError, match="too large"):
            append(fd, b"not whole\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == b"whole\n"
    append(fd, b"again\n")
    assert path.read_bytes() == b"whole\nagain\n"
    os.close(fd)
    with pytest.raises(FileExistsError):
        open_append(path, new=True)


def test_a_directory_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    for sink in (TensorBoardSink(tmp_path / "file" / "trainvet"), JsonLinesSink(tmp_path / "file" / "trainvet")):
        with pytest.raises(OSError, match="file"):
            sink.start(0, {})
        sink.close()


def test_a_file_that_vanished_is_no_reason_to_stop(tmp_path):
    sink = TensorBoardSink(tmp_path / "run")
    sink.start(0, {})
    only(tmp_path / "run").unlink()
    (tmp_path / "run").rmdir()
    for item in run(30):
        sink.write(item, [finding()])
    sink.report(30, ended())
    sink.close()

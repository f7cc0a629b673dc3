"""Evaluations between two steps: judged, kept, written and read back without a changed bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from tests.recorded import run, same, selection
from trainvet.finding import Finding
from trainvet.integrations.tensorboard.reader import read
from trainvet.integrations.tensorboard.sink import TensorBoardSink
from trainvet.monitor import Monitor
from trainvet.poison import Poison
from trainvet.recording import replay, round_tables
from trainvet.rule import Rule
from trainvet.statistics import MEANING, Facts, Snapshot, Table, Track

TABLES = {
    "validation_input": Table(("input",), {"mean": np.array([0.1]), "std": np.array([1.5])}),
    "validation_module": Table(("", "net.1"), {"training": np.array([0.0, 1.0]), "unsettled": np.array([0.0, 0.25])}),
}


def evaluation(step: int, loss: float, tables: bool = True) -> Snapshot:
    at = np.array([step])
    metrics = {name: Track(at, at + 1, np.array([value])) for name, value in (("val_loss", loss), ("val_acc", np.nan))}
    return round_tables(Snapshot(step, step + 1, tables=TABLES if tables else {}, series={"metric.value": metrics}))


@dataclasses.dataclass
class HighMetric(Rule):
    """Tells of every metric above 1 and of every evaluation with a module in training mode."""

    code: ClassVar[str] = "ZZ902"
    reads: ClassVar[frozenset[str]] = frozenset({"metric.value", "validation_module.training", "validation_input.std"})

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        for name, track in snapshot.tracks("metric.value").items():
            if track.values[-1] > 1:
                yield self.finding(snapshot.step, f"{name} {track.values[-1]!r}", where=name)
        modes = snapshot.column("validation_module.training")
        if modes is not None and modes[1].any():
            yield self.finding(snapshot.step, f"training {modes} {snapshot.column('validation_input.std')}", where="mode")


def mixed() -> list[Snapshot]:
    items: list[Snapshot] = []
    for held in run(40):
        items.append(held)
        if held.step in (1, 2, 20, 39):  # after two neighbouring steps, in the middle, at the end; twice at one step
            items.append(evaluation(held.step, 2.0 if held.step == 20 else 0.5))
        if held.step == 20:
            items.append(evaluation(held.step, 0.4, tables=False))
    return items


def test_an_evaluation_is_no_sample_of_the_training() -> None:
    monitor = Monitor(selection(HighMetric()), every=10)
    monitor.begin(Facts(planned_steps=100))
    for step in range(12):
        monitor.observe(Snapshot(step, step + 1, tables={"weight": Table(("w",), {"rms": np.ones(1)})} if step == 11 else {}))
    due = [monitor.due(step) for step in range(12, 25)]
    monitor.observe(evaluation(11, 0.5))
    assert (monitor.step, monitor.applied) == (12, 12)
    assert [monitor.due(step) for step in range(12, 25)] == due
    assert evaluation(3, 1.0).aside
    assert not evaluation(3, 1.0).sampled
    assert Snapshot(0, 1).sampled is Snapshot(0, 1).aside is False


def test_an_evaluation_ends_no_poison() -> None:
    poison = Poison()
    at = np.array([5])
    assert poison.clean(Snapshot(5, 6, series={"loss.value": {"loss": Track(at, at, np.array([np.nan]))}})) is not None
    assert poison.clean(evaluation(5, 0.5)) is None
    assert poison.since == 5
    assert Poison().clean(held := evaluation(5, float("nan"))) is held


def test_history_holds_metrics_and_evaluations() -> None:
    monitor = Monitor(selection(HighMetric()))
    monitor.begin(Facts())
    for item in mixed():
        monitor.observe(item)
    losses = monitor.history("metric.value")
    assert losses.steps.tolist() == [1, 2, 20, 39]
    assert losses.values[:, losses.subjects.index("val_loss")].tolist() == [0.5, 0.5, 0.4, 0.5]
    modes = monitor.history("validation_module.training")
    assert (modes.subjects, modes.values.tolist()) == (("", "net.1"), [[0, 1]] * 4)


def test_a_run_with_evaluations_comes_back_and_is_judged_the_same(tmp_path: Path) -> None:
    monitor = Monitor(selection(HighMetric()), sinks=[TensorBoardSink(tmp_path)])
    monitor.begin(Facts(planned_steps=40))
    for item in mixed():
        monitor.observe(item)
    monitor.end()
    assert monitor.errors == []
    recording = read(tmp_path)
    assert recording.notes == ()
    assert len(recording.snapshots) == len(mixed())
    assert all(same(left, right) for left, right in zip(recording.snapshots, mixed(), strict=True))
    again = Monitor(selection(HighMetric()))
    report = replay(recording, again)
    assert [item.to_dict() for item in report.findings] == [item.to_dict() for item in monitor.report.findings] != []


def test_a_training_step_told_twice_is_still_refused(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.start(0, {})
    items = list(run(3))
    for item in (*items, items[-1]):
        sink.write(item, ())
    sink.close()
    recording = read(tmp_path)
    assert [item.step for item in recording.snapshots] == [0, 1, 2]
    assert "comes after step 2" in recording.notes[0]


def test_many_evaluations_stay_within_the_budget(tmp_path: Path) -> None:
    monitor = Monitor(selection(HighMetric()), sinks=[sink := TensorBoardSink(tmp_path)])
    monitor.begin(Facts(planned_steps=1000))
    for item in run(1000, count=40):
        monitor.observe(item)
        for _ in range(3):
            monitor.observe(evaluation(item.step, 0.5))
    sink.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3_000_000


def test_every_target_and_track_of_the_vocabulary_is_written_and_read(tmp_path: Path) -> None:
    tables: dict[str, dict[str, np.ndarray]] = {}
    series: dict[str, dict[str, Track]] = {}
    at = np.array([0])
    for number, key in enumerate(MEANING):
        target, statistic = key.split(".")
        if target in ("loss", "optimizer", "metric", "run"):
            series[key] = {f"{target} one": Track(at, at + 1, np.array([number / 7]))}
        else:
            tables.setdefault(target, {})[statistic] = np.array([number / 7, np.nan])
    held = round_tables(Snapshot(0, 1, tables={target: Table(("a", "b"), columns) for target, columns in tables.items()}, series=series))
    sink = TensorBoardSink(tmp_path)
    sink.start(0, {})
    sink.write(held, ())
    sink.close()
    (back,) = read(tmp_path).snapshots
    assert same(back, held)
    assert set(back.keys()) == set(MEANING)


def test_what_is_expected_is_among_the_facts_of_every_edge() -> None:
    told: list[Facts] = []

    class Listening(HighMetric):
        code = "ZZ903"

        def begin(self, facts: Facts) -> Iterable[Finding]:
            told.append(facts)
            return ()

    monitor = Monitor(selection(Listening()), expect={"val_acc": 0.9})
    monitor.begin(Facts(), 0)
    assert told[-1].expect == monitor.facts.expect == {"val_acc": 0.9}

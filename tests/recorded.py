"""Runs made of numbers alone, for the tests of what is written about a run and read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.monitor import Monitor, Sink
from trainvet.recording import round_tables
from trainvet.report import Report
from trainvet.rule import Rule
from trainvet.selection import Selection, choose
from trainvet.statistics import Facts, Optimizer, Schedule, Snapshot, Subject, Table, Track

GRADIENT = ("norm", "present", "rms", "abs_max", "zero_share", "nan", "inf", "identical_rows")
WEIGHT = ("rms", "abs_max", "std", "nan", "inf", "identical_rows")
UPDATE = ("ratio", "rms", "unchanged")
ACTIVATION = ("zero_share", "dead_share", "saturated_share", "nan", "inf", "positions")


@dataclasses.dataclass
class LoudGradient(Rule):
    """
    ## What it checks
    A gradient norm above ``limit``.
    ## Why it matters
    It is a rule for tests.
    ## What to do
    Nothing.
    ## Known limits
    None.
    """

    code: ClassVar[str] = "ZZ901"
    reads: ClassVar[frozenset[str]] = frozenset({"gradient.norm"})
    severity: ClassVar[Severity] = Severity.ERROR
    limit: float = 10.0

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Every subject at once."""
        column = snapshot.column("gradient.norm")
        if column is not None:
            loud = [name for name, norm in zip(column[0], column[1].tolist(), strict=True) if norm > self.limit]
            if loud:
                yield self.finding(snapshot.step, f"norm {column[1].max()}", subjects=loud, evidence={"norm": float(column[1].max())})


def parameters(count: int) -> tuple[str, ...]:
    """Names of ``count`` parameters."""
    return tuple(f"encoder.layers.{index // 2}.fc{index % 2}.weight" for index in range(count))


def plan(count: int = 6, steps: int = 100, **more: Any) -> Facts:
    """Facts of a run with ``count`` matrices, one ReLU for two of them, and a cosine schedule."""
    names = parameters(count)
    subjects = [Subject(name, "parameter", name.rsplit(".", 1)[0], "Linear", index, (64, 64), group="group 0") for index, name in enumerate(names)]
    subjects += [Subject(name, "activation", name, "ReLU", shape=(32, 64), function="relu") for name in activations(count)]
    curve = 1e-3 * (1 + np.cos(np.linspace(0, np.pi, steps))) / 2
    return dataclasses.replace(
        Facts(
            framework="numbers",
            subjects=tuple(subjects),
            planned_steps=steps,
            optimizers=(Optimizer("adam", "Adam", "adam", 1e-8, betas=(0.9, 0.999), groups=("group 0",), parameters=names),),
            schedules=(Schedule("group 0", "cosine", "step", curve, horizon=float(steps)),),
        ),
        **more,
    )


def activations(count: int) -> tuple[str, ...]:
    """Names of the activations."""
    return tuple(f"encoder.layers.{index}.act" for index in range(count // 2))


def snapshot(step: int, rng: np.random.Generator, count: int = 6, rows: int = 1, sampled: bool = True, skipped: Sequence[int] = ()) -> Snapshot:
    """Numbers of one healthy step, with series of ``rows`` steps that end there."""
    tables = {}
    if sampled:
        names, acts = parameters(count), activations(count)
        zero = {"zero_share", "nan", "inf", "identical_rows", "unchanged", "dead_share", "saturated_share"}

        def table(of: tuple[str, ...], statistics: tuple[str, ...]) -> Table:
            return Table(of, {key: np.zeros(len(of)) if key in zero else rng.lognormal(-1, 0.3, len(of)) for key in statistics})

        tables = {"gradient": table(names, GRADIENT), "weight": table(names, WEIGHT), "update": table(names, UPDATE)}
        tables["gradient"] = Table(names, {**tables["gradient"].columns, "present": np.ones(count)})
        tables["update"] = Table(names, {**tables["update"].columns, "ratio": rng.lognormal(-7, 0.3, count)})
        if acts:
            tables["activation"] = table(acts, ACTIVATION)
    steps = np.arange(step - rows + 1, step + 1)
    series = {
        "loss.value": {"loss": Track(steps, steps + 1, rng.lognormal(0, 0.1, rows))},
        "run.gradient_norm": {"run": Track(steps, steps + 1, rng.lognormal(0, 0.1, rows))},
        "optimizer.learning_rate": {"group 0": Track(steps, steps + 1, np.full(rows, 1e-3))},
        "run.skipped": {"run": Track(steps, steps + 1, np.isin(steps, skipped).astype(np.float64))},
    }
    return Snapshot(step, step + 1, step % 50, step // 50, tables, series)


def run(steps: int, count: int = 6, every: int = 10, dense: int = 3, seed: int = 0) -> Iterator[Snapshot]:
    """A healthy run, rounded as a callback rounds it: the first ``dense`` steps and every ``every``-th are sampled."""
    rng = np.random.default_rng(seed)
    last = -1
    for step in range(steps):
        if step < dense or step % every == 0 or step == steps - 1:
            yield round_tables(snapshot(step, rng, count, rows=step - last))
            last = step


def changed(held: Snapshot, key: str, name: str, value: float) -> Snapshot:
    """The snapshot with one number of a table replaced, rounded."""
    target, statistic = key.split(".")
    table = held.tables[target]
    vector = table.columns[statistic].copy()
    vector[table.names.index(name)] = value
    return round_tables(dataclasses.replace(held, tables={**held.tables, target: Table(table.names, {**table.columns, statistic: vector})}))


def selection(*rules: Rule, select: Sequence[str] = ()) -> Selection:
    """Own rules, and those of the catalogue that are named."""
    return choose(select, rules=rules)


def judged(snapshots: Iterable[Snapshot], facts: Facts, chosen: Selection, sinks: Sequence[Sink], environment: Any = None) -> Monitor:
    """A run with sinks, up to but without its end."""
    monitor = Monitor(chosen, sinks=sinks, environment=environment or {"seed": 1})
    monitor.begin(facts)
    for item in snapshots:
        monitor.observe(item)
    return monitor


def same(left: Snapshot, right: Snapshot) -> bool:
    """Equal to the last bit, NaN included, in the same order."""

    def bits(vector: Any) -> bytes:
        return np.asarray(vector, dtype=np.float64).tobytes()

    def plain(held: Snapshot) -> Any:
        tables = {target: (table.names, {key: bits(vector) for key, vector in table.columns.items()}) for target, table in held.tables.items()}
        series = {
            key: {name: (track.steps.tolist(), track.applied.tolist(), bits(track.values)) for name, track in tracks.items()}
            for key, tracks in held.series.items()
        }
        return held.step, held.applied, held.batch, held.epoch, held.urgent, tables, series

    return bool(plain(left) == plain(right))


def finding(code: str = "ZZ901", severity: Severity = Severity.ERROR, step: int = 3, **more: Any) -> Finding:
    """A finding with odd characters in it."""
    told = {
        "message": "norm | grew `fast`\n<script>alert(1)</script> [red]x[/red] \x1b[31m",
        "subjects": ("a|b.<weight>\u202e",),
        "fixes": ("lower *it*",),
    }
    return Finding(code, "loud-gradient", severity, step, step, **{**told, "evidence": {"norm": float("nan")}, **more})


def ended(*findings: Finding, **more: Any) -> Report:
    """A report of a finished run."""
    return Report(**{"findings": findings, "status": "finished", "steps": 10, "applied": 10, **more})


def only(directory: Path) -> Path:
    """The one event file in a directory."""
    (path,) = sorted(directory.glob("events.out.tfevents.*"))
    return path

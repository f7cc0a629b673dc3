"""What a rule costs: median time of ``check`` for one report over many subjects. ``python -m benchmarks.rules [--subjects 10000] [CODE …]``.

A report holds a full table of everything the rule reads, for every subject, and ten rows of each series. Values are those of a healthy
run with noise, so that rules do their usual work. Times are medians over reports; a loaded machine makes them larger.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator

import numpy as np

from trainvet.rule import Rule, catalogue, defect
from trainvet.statistics import PARAMETER_TARGETS, SERIES_TARGETS, Facts, Layer, Loss, Optimizer, Snapshot, Subject, Table, Track, kind_of

LIMIT = 1e-3
REPORTS = 40
FUNCTIONS = ("relu", "gelu", "sigmoid", "tanh", "softmax", "")
KINDS = ("linear", "batch_norm", "dropout", "embedding", "activation")
HEALTHY = {  # what a statistic is in a healthy run, where 1 with a little noise would not do
    "gradient.present": 1.0,
    "module.called": 1.0,
    "module.training": 1.0,
    "validation_module.training": 0.0,
    "validation_module.unsettled": 0.001,
    "validation_input.count": 256.0,
    "module.values": 64.0,
    "module.samples": 64.0,
    "activation.positions": 5000.0,
    "activation.batches": 6.0,
    "update.ratio": 1e-3,
    "label.count": 64.0,
    "label.seen": 5000.0,
    "input.count": 64.0,
    "optimizer.learning_rate": 1e-3,
}
NOTHING = (
    "nan",
    "inf",
    "nonfinite",
    "batch_axis",
    "changed",
    "padding_share",
    "underflow_share",
    "swallowed_share",
    "unchanged",
    "identical_rows",
    "zero_share",
    "dead_share",
    "saturated_share",
    "constant",
    "out_of_range",
    "skipped",
    "close",
)


def facts(subjects: int) -> Facts:
    """A model with that many parameters, activations, buffers and modules."""
    several = range(subjects)
    parameters = tuple(Subject(f"net.{i}.weight", "parameter", f"net.{i}", "Linear", i, (64, 64), group="group 0") for i in several)
    others = [
        *(Subject(f"net.{i}", "activation", f"net.{i}", "", i, (64, 64), function=FUNCTIONS[i % len(FUNCTIONS)], trainable=False) for i in several),
        *(Subject(f"net.{i}.running_mean", "buffer", f"net.{i}", "", i, (64,), trainable=False) for i in several),
        *(Subject(f"net.{i}", "module", f"net.{i}", "Linear", i) for i in several),
        *(Subject(name, name, shape=(64, 10), trainable=False) for name in ("input", "label", "output")),
    ]
    layers = tuple(
        Layer(f"net.{i}", "Linear", KINDS[i % len(KINDS)], depth=i, width_in=64, width_out=64, momentum=0.9, owns=True, trainable=True)
        for i in several
    )
    names = tuple(subject.name for subject in parameters)
    return Facts(
        framework="torch",
        subjects=(*parameters, *others),
        planned_steps=10_000,
        optimizers=(Optimizer("Adam", "Adam", "adam", 1e-8, 0.0, 0.01, (0.9, 0.999), ("group 0",), names, names),),
        losses=(Loss("loss", "cross_entropy", 10, 64, expects="logits", output_function="linear"),),
        layers=layers,
        loss_scaler=True,
        growth_interval=2000,
        autocast="float16",
    )


def snapshots(rule: Rule, plan: Facts, reports: int) -> Iterator[Snapshot]:
    """Reports that hold everything the rule reads."""
    random = np.random.default_rng(0)
    names = {kind: tuple(subject.name for subject in plan.subjects if subject.kind == kind) for kind in {subject.kind for subject in plan.subjects}}
    for report in range(reports):
        steps = np.arange(10 * report, 10 * report + 10)
        tables: dict[str, Table] = {}
        series: dict[str, dict[str, Track]] = {}
        for key in rule.reads:
            target, statistic = key.split(".", 1)
            level = HEALTHY.get(key, 0.0 if statistic in NOTHING else 1.0)
            if target in SERIES_TARGETS:
                name = {"loss": "loss", "optimizer": "group 0", "metric": "val_loss"}.get(target, "run")
                falling = level * (1 + np.exp(-steps / 100)) if target in ("loss", "metric") else np.full(len(steps), level)
                series[key] = {name: Track(steps, steps + 1, falling * (1 + 0.05 * random.standard_normal(len(steps))))}
                continue
            kind = kind_of(target) if target in PARAMETER_TARGETS else target.removeprefix("validation_")
            rows = names[kind]
            values = np.full(len(rows), level) if level in (0.0, 1.0) and key in HEALTHY else level * (1 + 0.05 * random.standard_normal(len(rows)))
            table = tables.get(target, Table(rows, {}))
            tables[target] = Table(rows, {**table.columns, statistic: values})
        yield Snapshot(int(steps[-1]), int(steps[-1]) + 1, int(steps[-1]), 0, tables, series)


def cost(kind: type[Rule], plan: Facts, reports: int = REPORTS) -> tuple[float, float]:
    """Median and largest time of one report, in seconds; the first reports, in which rules learn who is who, count for the largest only."""
    rule = kind()
    list(rule.begin(plan))
    times = []
    for snapshot in snapshots(rule, plan, reports):
        started = time.perf_counter()
        list(rule.check(snapshot))
        times.append(time.perf_counter() - started)
    return float(np.median(times)), max(times)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__)
    parser.add_argument("codes", nargs="*", metavar="CODE")
    parser.add_argument("--subjects", type=int, default=10_000)
    arguments = parser.parse_args()
    plan = facts(arguments.subjects)
    print(f"{arguments.subjects} subjects of each kind, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'code':6} {'median ms':>10} {'largest ms':>11}  name")
    total = 0.0
    for code, kind in catalogue().items():
        if arguments.codes and code not in arguments.codes:
            continue
        median, largest = cost(kind, plan)
        total += median
        print(f"{code:6} {1e3 * median:10.3f} {1e3 * largest:11.3f}  {defect(kind)}{'   above 1 ms' if median > LIMIT else ''}")
    print(f"{'all':6} {1e3 * total:10.3f}")


if __name__ == "__main__":
    main()

"""Measures one training run in Keras: what a callback builds when ``fit`` begins and asks for snapshots after each measured step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainvet.finding import Finding
from trainvet.integrations.keras import facts as known
from trainvet.integrations.keras.backend import Backend, Outcome, Step, choose
from trainvet.integrations.keras.journal import Journal
from trainvet.integrations.keras.layout import Reading, columns
from trainvet.integrations.keras.localise import Evidence, locate
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.step import Stepper
from trainvet.integrations.keras.window import Windows
from trainvet.monitor import Monitor
from trainvet.statistics import Facts, Snapshot, Subject, Table

TABLES = ("gradient", "weight", "update", "activation", "buffer", "input", "label")
GUARDED = frozenset({"gradient.nan", "gradient.inf", "gradient.norm"})
KEPT_ELEMENTS = 1 << 25  # up to 128 MB of weights are kept over a measured step, so that its batch can be replayed
HAND_OVER = 32  # steps after which series are handed over when nothing is sampled


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the callback knows of this ``fit``: epochs and steps an epoch (None: unknown), its first epoch, the other callbacks."""

    epochs: int | None = None
    steps: int | None = None
    first_epoch: int = 0
    companions: tuple[Any, ...] = ()


class Probe:
    """Measures ``model`` while ``fit`` runs.

    Order of calls: :meth:`begin_epoch`, :meth:`arm` at each batch, :meth:`end_epoch`; :meth:`close`. ``after`` is called when snapshots are
    ready to be polled; ``lost`` when an update was held and no more are allowed: both may raise TrainingAborted. ``failed`` is called
    while an error of ours is handled.
    """

    def __init__(
        self,
        model: Any,
        monitor: Monitor,
        fit: Fit,
        *,
        latched: bool = False,
        allowed: int = 0,
        step: int = 0,
        applied: int = 0,
        after: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda reason: None,
        failed: Callable[[str], None] = lambda what: None,
        backend: Backend | None = None,
    ) -> None:
        """``latched``: hold a non-finite update, since the run is going to be aborted; ``allowed``: how many may be dropped.
        ``step`` and ``applied`` continue the counts of an earlier fit."""
        self.model = model
        self.monitor = monitor
        self.after, self.lost, self.failed = after, lost, failed
        self.latched, self.allowed, self.dropped = latched, allowed, 0
        self.backend = backend or choose()
        self.reason = self.backend.refusal(model)
        self.planned = None if not fit.steps or fit.epochs is None else step + max(0, fit.epochs - fit.first_epoch) * fit.steps
        self.evidence: Evidence | None = None
        self._epoch, self._epoch_start = fit.first_epoch, step
        self._snapshots: list[Snapshot] = []
        self.stepper = Stepper(model, self.backend, self, guard=(latched or allowed > 0) and not self.reason)
        self.stepper.step = step
        if self.reason:
            monitor.note(self.reason)
            return
        self.optimizers = known.optimizers_of(model)
        self.plan = Plan(model)
        self.traits = known.Traits()
        self.resumed, self.pretrained = known.trained_before(self.plan, self.optimizers.values())
        self.schedules = known.describe_schedules(self.optimizers, self.planned, fit.companions)
        self.journal = Journal(model, self.optimizers, step, applied)
        self._windows = Windows()
        self._batch_size = 0
        self._force = False
        self._built = self.plan.built
        read = frozenset(key for rule in monitor.selection.rules.values() for key in rule.reads)
        self._want = frozenset(key for key in read if key.split(".", 1)[0] in TABLES or key == "run.gradient_norm")

    # ---- facts

    def facts(self) -> Facts:
        """The plan as it stands; complete after the first measured step."""
        if self.reason:
            hidden = dict.fromkeys((*TABLES, "loss", "optimizer", "run"), self.reason)
            return Facts("keras", planned_steps=self.planned, every_step=False, unobservable=hidden)
        optimizers, scaled = self.optimizers, self.journal.dynamic is not None
        owned = self.traits.owned or {"optimizer": tuple(name for name, variable in self.plan.parameters.items() if variable.trainable)}
        groups = {known.group_of(name, optimizers[name]): names for name, names in owned.items() if name in optimizers}
        unobservable = {} if scaled else {"run.loss_scale": "no loss scaler in use"}
        if not scaled and not self.allowed:
            unobservable["run.skipped"] = "no loss scaler in use, and no update may be dropped"
        return Facts(
            framework="keras",
            subjects=(*self.plan.subjects(groups), *(self._sized(subject) for subject in self.traits.subjects.values())),
            planned_steps=self.planned,
            optimizers=known.describe_optimizers(self.plan, optimizers, owned),
            schedules=self.schedules,
            losses=known.describe_losses(self.model, self.traits, self._batch_size) if self._batch_size else (),
            precision=known.precision_of(self.plan),
            loss_scaler=scaled,
            growth_interval=int(getattr(self.journal.dynamic, "dynamic_growth_steps", 0)),
            clipping=known.clipping_of(optimizers.values()),
            accumulation=self.journal.accumulation,
            manual_optimization=len(optimizers) > 1,
            every_step=False,
            resumed=self.resumed,
            pretrained=self.pretrained,
            profile="gan" if len(optimizers) > 1 else "",
            unobservable=unobservable,
        )

    def _sized(self, subject: Subject) -> Subject:
        """A subject with the batch size that was seen."""
        shape = tuple(size or (self._batch_size if index == 0 else 1) for index, size in enumerate(subject.shape))
        return dataclasses.replace(subject, shape=shape, depth=self.plan.depth.get(subject.module, -1) if subject.module else -1)

    @property
    def sampled_seconds(self) -> float:
        """Time that full measurements took beyond the user's own step."""
        return self.stepper.sampled_seconds

    # ---- what the callback calls

    def begin_epoch(self, epoch: int) -> None:
        """Keras has reset its metrics."""
        self._epoch, self._epoch_start = epoch, self.stepper.step
        if not self.reason:
            self.journal.begin_epoch()

    def arm(self) -> None:
        """A batch begins."""
        if not self.reason:
            self.stepper.arm()

    def end_epoch(self) -> None:
        """The last batch of the epoch is over, and the metrics still hold its numbers."""
        if not self.reason and self.stepper.step > self._epoch_start:
            self.journal.end_epoch()

    def poll(self, drain: bool = False) -> list[Snapshot]:
        """Snapshots that are ready; ``drain`` hands over the series that are left."""
        if drain and not self.reason and self.journal.series:
            self._hand_over({})
        ready, self._snapshots = self._snapshots, []
        return ready

    def locate(self, finding: Finding) -> Finding:
        """The finding with the layer in which the value was born, where a replay of the batch shows it."""
        return locate(finding, self.evidence, self.plan, self.backend) if self.evidence is not None else finding

    def close(self) -> None:
        """Nothing of ours is left on the model, and no batch is kept."""
        self.stepper.disarm()
        self.evidence = None

    # ---- what the stepper asks and tells

    def due(self, step: int) -> bool:
        """Of accumulated batches only those that update weights are measured."""
        return bool(self._want) and not self.reason and (self._force or self.monitor.due(step)) and self.journal.updates(step)

    def build(self, full: bool) -> Step:
        """With all statistics that some rule reads, or only with the guard."""
        if self.plan.sign() != self.plan.signature:
            self._replan()
        keep = full and self.plan.elements() <= KEPT_ELEMENTS
        return self.backend.measured(self.plan, self.optimizers, self._want if full else GUARDED, self.latched or self.allowed > 0, keep)

    def light(self, logs: dict[str, Any], batches: int) -> None:
        """A loss that has just become non-finite is told at once, and the next step is measured."""
        broke = self.journal.light(self.stepper.step - 1, logs, batches)
        self._force = self._force or broke
        if broke or (not self._want and self.stepper.step % HAND_OVER < batches and self.journal.series):
            self._hand_over({}, urgent=broke)
            self.after()

    def measured(self, logs: dict[str, Any], outcome: Outcome, batch: Any, full: bool) -> None:
        """Numbers of one batch have arrived."""
        step = self.stepper.step - 1
        reading = Reading(outcome.layout, outcome.vector)
        held = outcome.held and self.journal.dynamic is None
        self._batch_size = int(reading.number("run", "batch"))
        self.journal.measured(step, logs, reading, held, self.model.steps_per_execution)
        tables = self._tables(reading, self._want if full else GUARDED)
        if "gradient" in tables:
            self.journal.gradient_norm(step, float(np.sqrt(np.square(tables["gradient"].columns["norm"]).sum())))
        bad = held or _bad(reading)
        if not full and not bad:
            return
        if reading.number("run", "advanced", 1.0) == 0 or held:
            tables.pop("update", None)  # a skipped step has no update
        self._learn(full, step)
        self.evidence = Evidence(step, step - self._epoch_start, batch, outcome.before) if bad else None
        self._force = False
        self._hand_over(tables, urgent=bad)
        self.dropped += held
        try:
            self.after()
            if held and self.dropped > self.allowed:
                self.lost("the update is not finite and is held back; no more bad updates are allowed")
        finally:
            self.evidence = None

    def refused(self, reason: str) -> None:
        """From here on nothing is measured."""
        self.reason = reason
        self.monitor.note(reason)
        self.monitor.begin(self.facts(), self.stepper.step)

    # ---- inside

    def _learn(self, full: bool, step: int) -> None:
        """What tracing taught is told before the first numbers are; a model that was built in the meantime gets its names."""
        measured = self.stepper.steps.get(full)
        if measured is None or measured.traits is self.traits:
            return
        self.traits = measured.traits
        for error in measured.errors:
            self.monitor.errors.append(f"a statistic could not be measured\n{error}")
        if self.plan.sign() != self.plan.signature:
            self._replan()
        order = {name: index for index, name in enumerate(self.traits.order)}
        self.plan.order(order)
        self.monitor.begin(self.facts(), step)
        if not self._built:  # the first trace did not know the running statistics that the guard has to put back
            self._built = True
            if self.stepper.guard:
                self.stepper.forget()

    def _replan(self) -> None:
        depth = self.plan.depth
        self.plan = Plan(self.model)
        self.plan.depth = {**self.plan.depth, **depth}

    def _tables(self, reading: Reading, want: frozenset[str]) -> dict[str, Table]:
        rows = reading.raw.get("activation", {})
        for name, high in reading.units.items():
            row = rows[name]
            row["dead_share"], row["batches"], row["positions"] = self._windows.update(name, high, int(row["positions"]))
        tables = {}
        for target in TABLES:
            found = reading.raw.get(target, {})
            if found:
                order = self._ordered(found) if target == "activation" else list(found)
                filled = columns({name: found[name] for name in order}, want | ({"gradient.norm"} if target == "gradient" else set()), target)
                if filled:
                    tables[target] = Table(tuple(order), filled)
        return tables

    def _ordered(self, names: Mapping[str, Any]) -> list[str]:
        return sorted(names, key=lambda name: self.plan.depth.get(name, len(names)))

    def _hand_over(self, tables: dict[str, Table], urgent: bool = False) -> None:
        step = self.stepper.step - 1
        series = self.journal.flush()
        self._snapshots.append(Snapshot(step, self.journal.series.applied, step - self._epoch_start, self._epoch, tables, series, urgent))


def _bad(reading: Reading) -> bool:
    """Is a loss or a gradient of the step not finite?"""
    losses: Sequence[Mapping[str, float]] = list(reading.raw.get("loss", {}).values())
    gradients = reading.raw.get("gradient", {}).values()
    return any(not math.isfinite(row["value"]) for row in losses) or any(
        row.get("nan", 0.0) > 0 or row.get("inf", 0.0) > 0 or not math.isfinite(row.get("square", 0.0)) for row in gradients
    )

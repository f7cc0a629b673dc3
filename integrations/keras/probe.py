"""Measures one training run in Keras: what a callback builds when ``fit`` begins and asks for snapshots after each measured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainvet.finding import Finding
from trainvet.integrations.keras import facts as known
from trainvet.integrations.keras.backend import Backend, Outcome, Step, choose
from trainvet.integrations.keras.evaluation import Evaluation
from trainvet.integrations.keras.host import Host, clip_scale, unseen
from trainvet.integrations.keras.journal import Journal
from trainvet.integrations.keras.layout import Layout, Order, Reading
from trainvet.integrations.keras.localise import Evidence, locate
from trainvet.integrations.keras.objectives import describe_losses
from trainvet.integrations.keras.plan import Plan
from trainvet.integrations.keras.step import Stepper
from trainvet.integrations.keras.window import Windows
from trainvet.monitor import Monitor
from trainvet.statistics import TARGETS, Facts, Snapshot, Subject, Table, Track

TABLES = ("gradient", "weight", "update", "activation", "buffer", "input", "label", "output", "module")
HOST = ("input", "output", "module")  # not, or not only, from the packed vector
RATES = frozenset({"learning_rate", "lr"})  # in the logs, and no metrics
GUARDED_STATISTICS = {"gradient": ["inf", "nan", "norm"]}
GUARDED = frozenset(f"gradient.{name}" for name in GUARDED_STATISTICS["gradient"])
KEPT_ELEMENTS = 1 << 25  # up to 128 MB of weights are kept over a measured step, so that its batch can be replayed
HAND_OVER = 32  # steps after which series are handed over when nothing is sampled


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the callback knows of this ``fit``: epochs and steps an epoch (None: unknown), its first epoch, the other callbacks, and
    where the data are arrays: are they shuffled, and how many samples an epoch has."""

    epochs: int | None = None
    steps: int | None = None
    first_epoch: int = 0
    companions: tuple[Any, ...] = ()
    shuffled: bool | None = None
    samples: int | None = None


class Probe:
    """Measures ``model`` while ``fit`` runs.

    Order of calls: :meth:`begin_epoch`, ``stepper.arm`` at each batch, :meth:`end_epoch`; :meth:`close`. ``after`` is called when snapshots are
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
        earlier: Probe | None = None,
    ) -> None:
        """``latched``: hold a non-finite update, since the run is going to be aborted; ``allowed``: how many may be dropped.
        ``step`` and ``applied`` continue the counts of the fit that ``earlier`` measured; what that one has traced is used again."""
        self.model = model
        self.monitor = monitor
        self.after, self.lost, self.failed = after, lost, failed
        self.latched, self.allowed, self.dropped = latched, allowed, 0
        self.backend: Backend = choose()
        self.reason = self.backend.refusal(model)
        self.planned = None if not fit.steps or fit.epochs is None else step + max(0, fit.epochs - fit.first_epoch) * fit.steps
        self.evidence: Evidence | None = None
        self.fit = fit
        self._epoch, self._epoch_start, self._epoch_steps = fit.first_epoch, step, fit.steps
        self._snapshots: list[Snapshot] = []
        self.stepper = Stepper(model, self.backend, self, guard=(latched or allowed > 0) and not self.reason)
        self.stepper.step = step
        self.stepper.active = not self.reason
        if self.reason:
            monitor.note(self.reason)
            return
        self.optimizers = known.optimizers_of(model)
        self.plan = Plan(model)
        self.traits = known.Traits()
        self.resumed, self.pretrained = known.trained_before(self.plan, self.optimizers.values())
        self.schedules = known.describe_schedules(self.optimizers, self.planned, fit.companions)
        self.journal = Journal(model, self.optimizers, step, applied, self._hand_over_good)
        self._windows = Windows()
        self.evaluation = Evaluation(model, failed)
        self._batch_size = 0
        self._harmless: set[str] = set()
        self._force = False
        self._built = self.plan.built
        read = frozenset(key for rule in monitor.selection.rules.values() for key in rule.reads)
        self._told = step
        self._hidden = ""  # why there are only series
        self._learned: Step | None = None
        self._order: tuple[Layout, Order] | None = None
        self._want = frozenset(key for key in read if key.split(".", 1)[0] in TABLES or key == "run.gradient_norm")
        self._statistics = {target: sorted({key.split(".", 1)[1] for key in self._want if key.startswith(f"{target}.")}) for target in TABLES}
        self._statistics["gradient"] = sorted({*self._statistics["gradient"], *(["norm"] if self._want else [])})
        self._read = read
        self.stepper.timed = bool(read & {"run.step_seconds", "run.wait_seconds"})
        self.host = Host(model, self._statistics, monitor)
        self.stepper.together = 1 if self.journal.dynamic is not None else self.stepper.together
        if earlier is not None:
            self._take_over(earlier)

    # ---- facts

    def facts(self) -> Facts:
        """The plan as it stands; complete after the first measured step."""
        if self.reason:
            hidden = dict.fromkeys((*TARGETS, "facts"), self.reason)
            return Facts("keras", planned_steps=self.planned, every_step=False, unobservable=hidden)
        optimizers, scaled = self.optimizers, self.journal.dynamic is not None
        clipping, clipping_by = known.clipping_of(optimizers.values())
        owned = self.traits.owned or {"optimizer": tuple(name for name, variable in self.plan.parameters.items() if variable.trainable)}
        groups = {known.group_of(name, optimizers[name]): names for name, names in owned.items() if name in optimizers}
        unobservable = {} if scaled else {"run.loss_scale": "no loss scaler in use"}
        if self._hidden:
            unobservable |= dict.fromkeys((*TABLES, "run.gradient_norm"), self._hidden)
        unobservable |= unseen(self.plan, self.traits, clipping_by, scaled) | self.evaluation.unseen()
        if not scaled and not self.allowed:
            unobservable["run.skipped"] = "no loss scaler in use, and no update may be dropped"
        return Facts(
            framework="keras",
            subjects=(*self.plan.subjects(groups), *(self._sized(subject) for subject in self.traits.subjects.values()), *self.host.modules),
            planned_steps=self.planned,
            optimizers=known.describe_optimizers(self.plan, optimizers, owned),
            schedules=self.schedules,
            losses=describe_losses(self.model, self.traits, self._batch_size) if self._batch_size else (),
            precision=known.precision_of(self.plan),
            loss_scaler=scaled,
            growth_interval=int(getattr(self.journal.dynamic, "dynamic_growth_steps", 0)),
            clipping=clipping,
            clipping_by=clipping_by,
            accumulation=self.journal.accumulation,
            manual_optimization=len(optimizers) > 1,
            every_step=False,
            resumed=self.resumed,
            pretrained=self.pretrained,
            profile="gan" if len(optimizers) > 1 else "",
            layers=self.host.layers,
            shared_modules=self.host.shared,
            autocast=known.autocast_of(self.plan),
            batches_per_epoch=self._epoch_steps,
            samples_per_epoch=self.fit.samples,
            shuffled=self.fit.shuffled,
            balanced=self.traits.weighted,
            augmented=known.augments(self.plan),
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

    def pulse(self) -> int:
        """Changes while batches go on; read from another thread."""
        return self.stepper.begun

    # ---- what the callback calls

    def begin_epoch(self, epoch: int) -> None:
        """Keras has reset its metrics."""
        self._epoch, self._epoch_start = epoch, self.stepper.step
        self.stepper.ended = None
        if not self.reason:
            self.journal.begin_epoch()
            self.stepper.look_ahead()

    def end_epoch(self) -> None:
        """The last batch of the epoch is over, and the metrics still hold its numbers."""
        if not self.reason and self.stepper.step > self._epoch_start:
            self.stepper.hand_over()
            self.journal.end_epoch()

    def begin_evaluation(self) -> None:
        """A validation within the fit begins."""
        if not self.reason and any(key.startswith("validation_") for key in self._read):
            self.evaluation.begin(self.plan)

    def end_evaluation(self) -> None:
        """It is over: what it showed comes in a snapshot of its own with the step before it."""
        if self.reason or not self.stepper.step:
            return
        self.evaluation.end()
        updates = {name: int(self.traits.called.get(name, 1) * self.stepper.step) for name in self.evaluation.modes}
        self._extra(tables=self.evaluation.tables(self.plan, updates, self.resumed or self.pretrained, self._read))

    def metrics(self, logs: Mapping[str, Any] | None) -> None:
        """What Keras reports at the end of an epoch."""
        if self.reason or not self.stepper.step or "metric.value" not in self._read:
            return
        step = np.array([self.stepper.step - 1])
        applied = np.array([self.journal.applied(self.stepper.step - 1)])
        values = {name: float(value) for name, value in (logs or {}).items() if name not in RATES and isinstance(value, int | float | np.number)}
        self._extra(series={"metric.value": {name: Track(step, applied, np.array([value])) for name, value in values.items()}} if values else {})

    def _extra(self, tables: Mapping[str, Table] | None = None, series: Mapping[str, Mapping[str, Track]] | None = None) -> None:
        """A snapshot of what lies between two steps, after everything up to the step before."""
        if not tables and not series:
            return
        step = self.stepper.step - 1
        if self.journal.series:
            self._hand_over({})
        place = max(0, step - self._epoch_start)
        self._snapshots.append(Snapshot(step, self.journal.applied(step), place, self._epoch, tables or {}, series or {}))

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
        if not self.reason:
            self.evaluation.end()
        self.evidence = None

    # ---- what the stepper asks and tells

    def due(self, step: int) -> bool:
        """Of accumulated batches only those that update weights are measured."""
        return bool(self._want) and not self.reason and (self._force or self.monitor.due(step)) and self.journal.updates(step)

    def taken(self, batches: int) -> int:
        """Where the epoch may have ended within the block, the metric's count tells how many batches there were."""
        before = self.stepper.step - self._epoch_start
        if self._epoch_steps is not None and before + batches <= self._epoch_steps:
            return batches
        counted = self.journal.batches_in_epoch()
        return batches if counted is None else min(batches, max(1, counted - before))

    def build(self, full: bool) -> Step:
        """With all statistics that some rule reads, or only with the guard."""
        if self.plan.sign() != self.plan.signature:
            self._replan()
        keep = full and self.plan.elements() <= KEPT_ELEMENTS
        return self.backend.measured(self.plan, self.optimizers, self._want if full else GUARDED, self.latched or self.allowed > 0, keep)

    def light(self, blocks: list[tuple[int, Any, int]]) -> None:
        """A loss that has just become non-finite is told at once, and the next step is measured."""
        self._clock()
        if self.journal.light(blocks):
            self._force = True
            self.stepper.look_ahead()
            self._hand_over({}, urgent=True)
            self.after()
        elif not self._want and self.journal.series and self.stepper.step - self._told >= HAND_OVER:
            self._hand_over({})
            self.after()

    def measured(self, logs: dict[str, Any], outcome: Outcome, batch: Any, full: bool) -> None:
        """Numbers of one batch have arrived."""
        step = self.stepper.step - 1
        reading = Reading(outcome.layout, outcome.vector)
        held = outcome.held and self.journal.dynamic is None
        self._batch_size = int(reading.number("run", "batch"))
        self._learn(full, step)
        dropped = held and self.dropped < self.allowed
        self.dropped += dropped
        bad = held or _bad(reading)
        self.journal.measured(step, logs, reading, bad, held, dropped, self.model.steps_per_execution)
        tables = self._tables(reading, full)
        if "gradient" in tables:
            norms = tables["gradient"].columns["norm"]
            self.journal.gradient_norm(step, float(np.linalg.norm(norms)))
            scale = clip_scale(norms, *known.clipping_of(self.optimizers.values())) if "run.clip_scale" in self._read else None
            self.journal.add("run.clip_scale", step, scale)
        if full:
            tables |= self.host.tables(batch, outcome, reading)
            self.journal.add("run.batch_size", step, float(self._batch_size) if "run.batch_size" in self._read else None)
        self._clock()
        if not full and not bad:
            return
        if reading.number("run", "advanced", 1.0) == 0 or held:
            tables.pop("update", None)  # a skipped step has no update
        if bad:
            self.evidence = Evidence(step, step - self._epoch_start, batch, outcome.before, frozenset(self._harmless))
        else:
            self._harmless.update(_nonzero(tables.get("activation"), "nan"))
        self._force = False
        self._hand_over(tables, urgent=held)  # of a held step the weights are those from before it
        try:
            self.after()
            if held and not dropped:
                self.lost("the update is not finite and is held back; no more bad updates are allowed")
        finally:
            self.evidence = None

    def refused(self, reason: str) -> None:
        """From here on there is only what the logs say."""
        self._hidden, self._want = f"{reason}: only losses and learning rates are observed", frozenset()
        self.monitor.note(self._hidden)
        if self.latched or self.allowed:
            self.monitor.note("an update that is not finite cannot be held here")
        self.monitor.begin(self.facts(), self.stepper.step)
        self.stepper.look_ahead()

    # ---- inside

    def _take_over(self, earlier: Probe) -> None:
        same = earlier.model is self.model and not earlier.reason and earlier.optimizers == self.optimizers
        if same and (earlier._want, earlier.stepper.guard) == (self._want, self.stepper.guard) and earlier.plan.signature == self.plan.signature:
            self.plan, self.traits, self.resumed, self.pretrained = earlier.plan, earlier.traits, earlier.resumed, earlier.pretrained
            self.host.take_over(earlier.host)
            self._batch_size, self._windows, self._harmless, self._learned = (
                earlier._batch_size,
                earlier._windows,
                earlier._harmless,
                earlier._learned,
            )
            self.stepper.take_over(earlier.stepper)

    def _learn(self, full: bool, step: int) -> None:
        """What tracing taught is told before the first numbers are; a model that was built in the meantime gets its names."""
        measured = self.stepper.steps.get(full)
        if measured is None or measured is self._learned or (self._learned is not None and not full):
            return
        self._learned, self.traits = measured, measured.traits
        for error in measured.errors:
            self.monitor.errors.append(f"a statistic could not be measured\n{error}")
        if self.plan.sign() != self.plan.signature:
            self._replan()
        self.plan.order({name: index for index, name in enumerate(self.traits.order)})
        self.host.learn(self.plan, self.traits)
        self.monitor.begin(self.facts(), step)
        if not self._built and self.stepper.guard:  # the first trace did not know the running statistics that the guard has to put back
            self.stepper.forget()
        self._built = True

    def _replan(self) -> None:
        depth = self.plan.depth
        self.plan = Plan(self.model)
        self.plan.depth = {**self.plan.depth, **depth}

    def _tables(self, reading: Reading, full: bool) -> dict[str, Table]:
        if reading.units:
            seen = dict(zip(reading.layout.names["activation"], reading.raw["activation"]["positions"].tolist(), strict=True))
            found = {name: self._windows.update(name, high, int(seen[name])) for name, high in reading.units.items()}
            for place, raw in enumerate(("dead_share", "batches", "positions")):
                reading.set("activation", raw, {name: float(numbers[place]) for name, numbers in found.items()})
        if full and self._statistics["buffer"] and "buffer" in reading.raw:
            self.host.compare_buffers(reading)
        tables = {
            target: reading.table(target, names)
            for target, names in (self._statistics if full else GUARDED_STATISTICS).items()
            if target != "activation" and target not in HOST
        }
        if full and "activation" in self._statistics:
            if self._order is None or self._order[0] is not reading.layout:
                self._order = reading.layout, reading.layout.by("activation", self.plan.depth)
            tables["activation"] = reading.table("activation", self._statistics["activation"], self._order[1])
        return {target: table for target, table in tables.items() if table is not None}

    def _clock(self) -> None:
        """The host clock's times since the last call."""
        times, self.stepper.times = self.stepper.times, []
        for step, batches, seconds, waited in times:
            for at in range(step - batches + 1, step + 1):
                self.journal.add("run.step_seconds", at, seconds / batches if "run.step_seconds" in self._read else None)
            if waited is not None and "run.wait_seconds" in self._read:
                self.journal.add("run.wait_seconds", step, waited)

    def _hand_over_good(self, step: int) -> None:
        """What comes before a bad step is handed over by itself, so that the last good step is known."""
        if step >= self._told:
            self._hand_over({}, step=step)

    def _hand_over(self, tables: dict[str, Table], urgent: bool = False, step: int | None = None) -> None:
        step = self.stepper.step - 1 if step is None else step
        self._told = step + 1
        series, applied = self.journal.flush(step), self.journal.applied(step)
        self._snapshots.append(Snapshot(step, applied, max(0, step - self._epoch_start), self._epoch, tables, series, urgent))


def _nonzero(table: Table | None, *statistics: str) -> list[str]:
    """The subjects for which one of the statistics is not 0."""
    if table is None:
        return []
    rows = [table.columns[name] != 0 for name in statistics if name in table.columns]
    return [name for name, bad in zip(table.names, np.any(rows, axis=0), strict=True) if bad] if rows else []


def _bad(reading: Reading) -> bool:
    """Is a loss or an element of a gradient not finite? (A sum of squares may overflow although every element is.)"""
    gradient, losses = reading.raw.get("gradient", {}), reading.raw.get("loss", {})
    if "value" in losses and not np.isfinite(losses["value"]).all():
        return True
    return any(bool(gradient[raw].any()) for raw in ("nan", "inf") if raw in gradient)

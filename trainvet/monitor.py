"""One run: snapshots in, findings out, actions back. Holds no framework object.

Where things are measured in one optimizer step:

    for batch in loader:
        loss = criterion(model(inputs), labels)     # activations, inputs, labels (sampled steps); loss (every step)
        loss.backward()
        unscale gradients                           # loss scale, skipped
        # ---- gradients are read here: unscaled, accumulated, before clipping
        # ---- a non-finite row is judged here, before the update, where the device allows it
        clip gradients
        optimizer.step()
        # ---- weights, updates, buffers are read here (sampled steps)
        monitor.observe(snapshot)                   # rules -> causes -> sinks -> action
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from trainvet import report as states
from trainvet.action import AbortOn, Action
from trainvet.cause import order
from trainvet.finding import Finding, Severity
from trainvet.history import History, Recorder
from trainvet.poison import Poison
from trainvet.report import Coverage, Report
from trainvet.rule import Rule
from trainvet.schedule import Schedule
from trainvet.selection import PROFILES, Selection
from trainvet.statistics import Facts, Snapshot

POISON = "NF101"
ASIDE = frozenset({"optimizer.learning_rate", "run.skipped"})  # many rules keep an eye on these; alone they are no evidence
EVERY_STEP = frozenset({"loss.value", "optimizer.learning_rate", "run.gradient_norm", "run.loss_scale", "run.skipped"})


class Sink(Protocol):
    """A place a run is told to. Every method may raise: the monitor then switches the sink off and training goes on."""

    def start(self, step: int, environment: Mapping[str, Any]) -> None:
        """The run starts (or resumes) at ``step``."""

    def facts(self, step: int, facts: Facts) -> None:
        """The plan, at the start and whenever it changes."""

    def write(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        """A snapshot and what the rules found in it."""

    def report(self, step: int, report: Report) -> None:
        """The report has changed: a finding was made, or the run ended."""

    def close(self) -> None:
        """The run is over. May be called twice."""


class Monitor:
    """Runs the selected rules over the snapshots of one run.

    ``locate``, set by the callback, asks the probe where a non-finite value was born; it is called once, before that finding is told.
    ``own_seconds`` and ``run_seconds`` are the callback's measurements of our own and of the whole time.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        sinks: Iterable[Sink] = (),
        abort_on: str | Sequence[str] | None = None,
        profile: str | None = None,
        every: int | str = "auto",
        on_finding: Callable[[Finding], None] | None = None,
        environment: Mapping[str, Any] | None = None,
        expect: Mapping[str, float] | None = None,
    ) -> None:
        """Raises ValueError for an unknown profile, severity or rule name, or an impossible interval."""
        if profile is not None and profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}; one of {', '.join(PROFILES)}")
        own = {name: rule.code for rule in selection.rules.values() for name in (rule.name, rule.code)}
        self.selection = selection
        self.schedule = Schedule(every)
        self.abort_on = AbortOn(abort_on, own)
        self.profile = profile
        self.expect = dict(expect or {})
        self.locate: Callable[[Finding], Finding] | None = None
        self.on_finding = on_finding
        self.environment: dict[str, Any] = dict(environment or {})
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.status, self.reason = "running", ""
        self.step = self.applied = 0
        self.last_good_step: int | None = None
        self.own_seconds = self.run_seconds = 0.0
        self.aborted_by: Finding | None = None
        self._sinks = list(sinks)
        self._recorder = Recorder()
        self._poison = Poison()
        self._facts = Facts()
        self._found: list[Finding] = []
        self._checks: dict[str, int] = {}
        self._off: dict[str, str] = {}
        self._exempted: dict[str, list[Finding]] = {}
        self._keys: frozenset[str] | None = None
        self._begun = False

    # ---- the run, in order

    def begin(self, facts: Facts, step: int = 0) -> Action:
        """The run starts, resumes, or its plan changed; ``step`` is the next optimizer-step attempt."""
        first, self._begun = not self._begun, True
        if self.expect and not facts.expect:
            facts = dataclasses.replace(facts, expect=self.expect)
        self._facts, self._keys = facts, None
        self._poison.begin(facts)
        if first:
            self.schedule.begin(facts.planned_steps, step)
            self.environment.setdefault("arguments", {**self.selection.arguments(), "profile": self.profile})
            self._tell_sinks(lambda sink: sink.start(step, self.environment))
        self._tell_sinks(lambda sink: sink.facts(step, facts))
        found: list[Finding] = []
        for key, rule in list(self.selection.rules.items()):
            found += self._run(key, rule, lambda rule=rule: rule.begin(facts))  # type: ignore[misc]
        # rules have no clock of their own: what the plan shows holds from this step on
        found = [dataclasses.replace(finding, step=step, first_step=step) if finding.step < step else finding for finding in found]
        return self._tell(found, Snapshot(step=step, applied=self.applied))

    def want(self, step: int) -> frozenset[str]:
        """The statistics that are due at ``step``: all that some rule reads on a sampled step, the series on every step."""
        return self.keys if self.schedule.due(step) else self.keys & EVERY_STEP

    @property
    def keys(self) -> frozenset[str]:
        """All statistics that some selected rule reads and that can be observed here."""
        if self._keys is None:
            read = frozenset(key for rule in self.selection.rules.values() for key in rule.reads)
            self._keys = frozenset(key for key in read if self._facts.why_not((key,)) == "")
        return self._keys

    def due(self, step: int) -> bool:
        """Is ``step`` a sampled step?"""
        return self.schedule.due(step)

    def observe(self, snapshot: Snapshot) -> Action:
        """Judge a snapshot, tell what was found, and say whether the run is to end."""
        self.step, self.applied = snapshot.step + 1, snapshot.applied
        if snapshot.sampled:
            self.schedule.sampled(snapshot.step)
        self._recorder.add(snapshot)
        clean = self._poison.clean(snapshot)
        all_keys = frozenset(snapshot.keys())
        clean_keys = all_keys if clean is snapshot or clean is None else frozenset(clean.keys())
        if self._poison.since is None:
            self.last_good_step = snapshot.step
        elif self.last_good_step is None or self.last_good_step >= self._poison.since:
            self.last_good_step = self._poison.since - 1 if self._poison.since > 0 else None
        found: list[Finding] = []
        for key, rule in list(self.selection.rules.items()):
            seen = snapshot if rule.sees_poison else clean
            keys = all_keys if seen is snapshot else clean_keys
            if seen is None or not rule.reads & keys:
                continue
            if _evidence(rule) & keys:
                self._checks[key] = self._checks.get(key, 0) + 1
            found += self._run(key, rule, lambda rule=rule, seen=seen: rule.check(seen))  # type: ignore[misc]
        return self._tell(found, snapshot)

    def tell(self, finding: Finding) -> Action:
        """Take in what a selected rule was asked outside of a snapshot (the watchdog's finding)."""
        return self._tell([finding], Snapshot(step=finding.step, applied=self.applied))

    def end(self, status: str = "finished", reason: str = "") -> Report:
        """The run is over: "finished", "aborted" or "failed". Idempotent; the first call wins."""
        if self.status == "running":
            if status == "finished":
                found = []
                for key, rule in list(self.selection.rules.items()):
                    found += self._run(key, rule, lambda rule=rule: rule.end(self.step))  # type: ignore[misc]
                self._tell(found, Snapshot(step=self.step, applied=self.applied))
            self.status, self.reason = status, reason
            self._tell_sinks(lambda sink: sink.report(self.step, self.report))
            self._tell_sinks(lambda sink: sink.close())
            self._sinks = []
        return self.report

    # ---- what can be asked at any time

    @property
    def facts(self) -> Facts:
        """The latest plan."""
        return self._facts

    @property
    def report(self) -> Report:
        """The report as it stands."""
        depth = {subject.name: subject.depth for subject in self._facts.subjects}
        share = self.own_seconds / self.run_seconds if self.run_seconds > 0 else 0.0
        return Report(
            findings=tuple(order(self._found, depth)),
            coverage=tuple(self._coverage(key, rule) for key, rule in self.selection.rules.items()),
            status=self.status,
            reason=self.reason,
            steps=self.step,
            applied=self.applied,
            last_good_step=self.last_good_step,
            notes=tuple(self.notes),
            errors=tuple(self.errors),
            exempted=self._exemptions(),
            cost={"seconds": self.own_seconds, "share": share},
            environment=self.environment,
        )

    def history(self, key: str) -> History:
        """What was measured of one statistic. Raises KeyError for an unknown name."""
        return self._recorder.get(key)

    def note(self, text: str) -> None:
        """Something the user should know; kept once, in order."""
        if text not in self.notes:
            self.notes.append(text)

    def failed(self, what: str) -> None:
        """An error inside trainvet, with its traceback (call it while handling the exception)."""
        self.errors.append(f"{what}\n{traceback.format_exc()}")

    def state_dict(self) -> dict[str, Any]:
        """Rules' histories and counters as plain numbers, lists and strings."""
        return {
            "version": 1,
            "step": self.step,
            "applied": self.applied,
            "schedule": self.schedule.state_dict(),
            "rules": {key: self._state(key, rule) for key, rule in self.selection.rules.items()},
            "findings": [finding.to_dict() for finding in self._found],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; what belongs to a rule that is not selected any more is left out."""
        self.step, self.applied = int(state["step"]), int(state["applied"])
        self.schedule.load_state_dict(state["schedule"])
        for key, saved in state["rules"].items():
            if key in self.selection.rules and saved:
                rule = self.selection.rules[key]
                self._run(key, rule, lambda rule=rule, saved=saved: rule.load_state_dict(saved) or ())  # type: ignore[misc]
        self._found = [Finding.from_dict(item) for item in state["findings"]]

    # ---- inside

    def _run(self, key: str, rule: Rule, call: Callable[[], Iterable[Finding]]) -> list[Finding]:
        if key in self._off:
            return []
        try:
            return list(call())
        except Exception as error:  # a fault of ours must not stop a training
            self._off[key] = repr(error)
            self.failed(f"{rule.code} {rule.name} was switched off")
            return []

    def _state(self, key: str, rule: Rule) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self._run(key, rule, lambda: state.update(rule.state_dict()) or ())
        return state

    def _tell(self, found: list[Finding], snapshot: Snapshot) -> Action:
        told = [self._shape(finding) for finding in found]
        kept = [finding for finding in told if finding is not None]
        action = Action.NOTHING
        before = {(head.code, head.step, head.where) for head in self.report.findings} if kept else set()
        for finding in kept:
            self._found.append(finding)
            if self.aborted_by is None and self.abort_on.applies(finding):
                self.aborted_by, action = finding, Action.ABORT
        if kept or snapshot.tables or snapshot.series:
            self._tell_sinks(lambda sink: sink.write(snapshot, kept))
        if kept:
            report = self.report
            self._tell_sinks(lambda sink: sink.report(snapshot.step, report))
            for head in report.findings:
                if (head.code, head.step, head.where) not in before and head in _without_consequences(kept, head):
                    self._call_back(head)
        return action

    def _shape(self, finding: Finding) -> Finding | None:
        if finding.code == POISON and self.locate is not None:
            locate, self.locate = self.locate, None
            try:
                finding = locate(finding)
            except Exception:  # the finding itself must still be told
                self.failed("locating the first non-finite value failed")
        narrowed = self.selection.narrow(finding)
        entries = self.selection.exemption(finding)
        if entries:
            self._exempted.setdefault(entries, []).append(finding)
        profile = self.profile or self._facts.profile
        if narrowed is not None and profile and any(narrowed.code.startswith(code) for code in PROFILES.get(profile, ())):
            if narrowed.severity > Severity.INFO:
                self._exempted.setdefault(f"profile {profile}, as information only", []).append(narrowed)
            narrowed = dataclasses.replace(narrowed, severity=Severity.INFO)
        return narrowed

    def _exemptions(self) -> tuple[str, ...]:
        """What the user's exemptions and the profile kept quiet, a line each."""
        lines = [f"{code} {name} was not run" for code, name in sorted(self.selection.ignored.items())]
        for entries, found in self._exempted.items():
            shown = dict.fromkeys(f"{item.code} at {item.where or 'the run'}, step {item.step}" for item in found)
            rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            lines.append(f"{entries}: {'; '.join(list(shown)[:3])}{rest}")
        return tuple(lines)

    def _call_back(self, finding: Finding) -> None:
        if self.on_finding is None:
            return
        try:
            self.on_finding(finding)
        except Exception:  # the user's pager being down must not stop a training
            self.on_finding = None
            self.failed("on_finding raised and was switched off")

    def _tell_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception:
                self._sinks.remove(sink)
                self.failed(f"{type(sink).__name__} was switched off")

    def _coverage(self, key: str, rule: Rule) -> Coverage:
        checks, missing = self._checks.get(key, 0), ""
        if key not in self._off:
            try:
                missing = rule.missing()
            except Exception as error:
                self._off[key] = repr(error)
                self.failed(f"{rule.code} {rule.name} was switched off")
        if key in self._off:
            return Coverage(rule.code, rule.name, states.FAILED, self._off[key], checks)
        reason = self._facts.why_not(_evidence(rule) or ("facts",))
        if not rule.reads and not reason:
            return Coverage(rule.code, rule.name, states.MISSING if missing else states.CHECKED, missing or "from the run's facts", 1)
        if reason and not checks:
            return Coverage(rule.code, rule.name, states.UNOBSERVABLE, reason)
        if not checks:
            return Coverage(rule.code, rule.name, states.NO_DATA)
        return Coverage(rule.code, rule.name, states.MISSING if missing else states.CHECKED, missing, checks)


def _evidence(rule: Rule) -> frozenset[str]:
    """What a rule judges by."""
    return rule.reads - ASIDE or rule.reads


def _without_consequences(kept: Sequence[Finding], head: Finding) -> list[Finding]:
    return [head for finding in kept if (finding.code, finding.step, finding.where) == (head.code, head.step, head.where)]

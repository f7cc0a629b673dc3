"""The arguments that every callback takes, checked at construction, and what it shows during and after a run."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainvet.action import AbortOn
from trainvet.callbacks.session import Session, writable
from trainvet.finding import Finding
from trainvet.history import History
from trainvet.report import Report
from trainvet.schedule import Schedule
from trainvet.selection import PROFILES, Selection, choose

SHARED = ("log_dir", "every", "profile", "abort_on", "abort", "skip_bad_updates", "strict", "on_finding")


@dataclasses.dataclass
class Options:
    """The arguments of :class:`Diagnostics` that concern the whole run, shared by all callbacks of one run."""

    log_dir: str | os.PathLike[str] | None = None
    every: int | str = "auto"
    profile: str | None = None
    abort_on: str | Sequence[str] | None = None
    abort: str = "raise"
    skip_bad_updates: int = 0
    strict: bool = False
    on_finding: Callable[[Finding], None] | None = None
    expect: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def merge(self, other: Options) -> None:
        """Take over what another callback of the same run sets. Raises ValueError where the two contradict each other."""
        default = Options()
        for name in SHARED:
            mine, theirs, unset = getattr(self, name), getattr(other, name), getattr(default, name)
            if mine == unset:
                setattr(self, name, theirs)
            elif theirs not in (unset, mine):
                raise ValueError(f"two trainvet callbacks of one run contradict each other: {name}={mine!r} and {name}={theirs!r}")
        for metric, value in other.expect.items():
            if self.expect.get(metric, value) != value:
                raise ValueError(
                    f"two trainvet callbacks of one run contradict each other: expect {metric}={self.expect[metric]!r} and {metric}={value!r}"
                )
        self.expect = {**self.expect, **other.expect}


class Watching:
    """What all callbacks have in common: the arguments, ``report`` and ``history``.

    The framework's edge (Lightning, Keras, a plain loop) adds the hooks.
    """

    focus: ClassVar[tuple[str, ...]] = ("default",)

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        select: Sequence[str] = ("default",),
        ignore: Sequence[str] = (),
        settings: dict[str, dict[str, Any]] | None = None,
        rules: Sequence[Any] = (),  # of Rule; jsonargparse takes a dataclass to be final, and would refuse its subclasses
        every: int | Literal["auto"] = "auto",
        profile: str | None = None,
        expect: dict[str, float] | None = None,
        abort_on: str | Sequence[str] | None = None,
        abort: Literal["raise", "stop"] = "raise",
        skip_bad_updates: int = 0,
        strict: bool = False,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        """Watch a training run.

        Args:
            log_dir: the run's directory; files go to its sub-directory "trainvet".
                Default: the logger's directory, else "runs/<time>".
            select: rules to run: "default", "all", codes ("GR101"), prefixes ("GR"), defect names,
                each with an optional place: "dead-relu@encoder.*".
            ignore: rules or places to mute, written likewise.
            settings: any rule's own numbers: {"dead-relu": {"share": 0.6}}.
            rules: own Rule or Watchpoint objects.
            every: steps between full measurements, or "auto".
            profile: "gan", "rl" or "finetune": turns rules that do not fit there into information.
            expect: metrics to be reached at the end: {"val_acc": 0.92}.
            abort_on: end the run early: "warning", "error", "fatal", or rule codes and names. Off by default.
            abort: "raise" TrainingAborted (it carries the report), or "stop" in the framework's graceful way.
            skip_bad_updates: how many non-finite updates may be dropped before the run is aborted.
            strict: decide before the optimizer step even on a GPU (one device wait per step).
            on_finding: called with each new headline.

        Raises:
            ValueError: unknown rules (with the nearest names) or settings, impossible numbers.
            OSError: a given log_dir that cannot be written.
        """
        chosen = self.focus if tuple(select) == ("default",) and not isinstance(select, str) else select
        self._selection: Selection = choose(chosen, ignore, settings, rules)
        Schedule(every)
        own = {name: rule.code for rule in self._selection.rules.values() for name in (rule.name, rule.code)}
        AbortOn(abort_on, own)
        if abort not in ("raise", "stop"):
            raise ValueError(f'abort={abort!r} must be "raise" or "stop"')
        if profile is not None and profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}; one of {', '.join(PROFILES)}")
        if not isinstance(skip_bad_updates, int) or skip_bad_updates < 0:
            raise ValueError(f"skip_bad_updates={skip_bad_updates!r} must be a whole number of at least 0")
        if on_finding is not None and not callable(on_finding):
            raise ValueError(f"on_finding={on_finding!r} must be callable")
        if log_dir is not None:
            writable(Path(log_dir))
        wanted = dict(expect or {})
        for metric, value in wanted.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"expect: {metric}={value!r} must be a finite number")
        self._options = Options(log_dir, every, profile, abort_on, abort, skip_bad_updates, strict, on_finding, wanted)
        self._select, self._own = tuple(select), tuple(rule.name for rule in rules)
        self._session: Session | None = None
        self._state: Mapping[str, Any] = {}
        self._last: Report = Report()

    @property
    def report(self) -> Report:
        """The report as it stands: of the present run, else of the last one. A focused callback sees its own rules."""
        if self._session is None:
            return self._last
        report = self._session.monitor.report
        own = {(rule.code, rule.name) for rule in self._selection.rules.values()}  # watchpoints share one code
        if own >= {(item.code, item.name) for item in report.coverage}:
            return report
        findings: list[Finding] = []
        for head in report.findings:  # what is folded under somebody else's headline is a headline here
            mine = (head.code, head.name) in own
            findings += [head] if mine else [finding for finding in head.consequences if (finding.code, finding.name) in own]
        return dataclasses.replace(
            report,
            findings=tuple(findings),
            coverage=tuple(item for item in report.coverage if (item.code, item.name) in own),
        )

    def history(self, key: str) -> History:
        """What was measured of one statistic, such as "gradient.norm". Raises KeyError for an unknown name."""
        if self._session is None:
            from trainvet.history import Recorder

            return Recorder().get(key)
        return self._session.monitor.history(key)

    @property
    def log_dir(self) -> Path | None:
        """Where this run's files are; None before the run or when nothing is written."""
        return self._session.log_dir if self._session is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the arguments, the report and the rules' histories, nothing that is alive."""
        state = dict(self.__dict__)
        state["_last"] = self.report
        if self._session is not None:
            state["_state"] = self._session.monitor.state_dict()
        state["_session"] = None
        return state

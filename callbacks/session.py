"""One run as every callback drives it: monitor, sinks, our own time, abort; an error of ours switches us off, never the training."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from trainvet.action import Action, TrainingAborted
from trainvet.callbacks.watchdog import Watchdog
from trainvet.environment import describe
from trainvet.finding import Finding
from trainvet.monitor import Monitor, Sink
from trainvet.recording import round_tables
from trainvet.selection import Selection
from trainvet.statistics import Facts, Snapshot

if TYPE_CHECKING:
    from trainvet.callbacks.diagnostics import Options

P = ParamSpec("P")
R = TypeVar("R")
SUBDIRECTORY = "trainvet"
LONG = 50  # the interval of a run of at least 3,000 steps: shorter ones need every sample they take
PACE, SHARE = 12, 0.01
LOST = "an update was not finite and was held back; no more bad updates are allowed"


def switched_off() -> bool:
    """``TRAINVET=off`` in the environment makes every callback a no-op."""
    return os.environ.get("TRAINVET", "").lower() in ("off", "0", "false")


def writable(directory: Path) -> Path:
    """Create ``directory`` and check that a file can be made in it. Raises OSError with one clear sentence."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".trainvet-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"log_dir {str(directory)!r} cannot be written: {error.strerror or error}") from error
    return directory


class Probe(Protocol):
    """What a framework's edge must offer."""

    def facts(self) -> Facts:
        """The plan as it is now."""

    def poll(self) -> list[Snapshot]:
        """Snapshots that have arrived."""

    def locate(self, finding: Finding) -> Finding:
        """The finding with the place where its non-finite value was born."""

    def close(self) -> None:
        """Remove everything of ours from the user's objects. May be called twice."""


class Session:
    """A monitor with its sinks, from the start of a run to its end.

    ``probe`` is set by the edge. ``stop`` is the framework's graceful stop, used with abort="stop".
    """

    def __init__(
        self,
        options: Options,
        selection: Selection,
        *,
        default_dir: Callable[[], Path | None],
        hyper_parameters: Mapping[str, Any] | None = None,
        writes: bool = True,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self.options = options
        self.log_dir = self._directory(default_dir) if writes else None
        self.monitor = Monitor(
            selection,
            sinks=self._sinks(writes),
            abort_on=options.abort_on,
            profile=options.profile,
            every=options.every,
            on_finding=options.on_finding if writes else None,
            environment=describe(hyper_parameters=hyper_parameters),
            expect=options.expect,
        )
        self.probe: Probe | None = None
        self.alive = True
        self.watchdog: Watchdog | None = None
        self._aborting = self._asked_to_stop = False
        self.checkpoint: Callable[[int | None], str | None] = lambda step: None
        self._stop = stop
        self._started = time.perf_counter()
        self._samples, self._mark = 0, (self._started, 0.0)

    # ---- the run

    def begin(self, probe: Probe, step: int = 0) -> None:
        """Start judging at ``step``; called again when the plan has changed."""
        self.probe = probe
        self.monitor.locate = self.monitor.locate or probe.locate
        self.act(self.monitor.begin(probe.facts(), step))
        rule = self._stall_rule()
        if self.watchdog is None and rule is not None:
            self.watchdog = Watchdog(float(rule.seconds), self.log_dir)
            self.watchdog.pulse = getattr(probe, "pulse", None)
            self.watchdog.start()

    def life(self) -> None:
        """Something moves: a step, a batch of an evaluation, a checkpoint. What the watchdog saw before that is told now."""
        dog = self.watchdog
        if dog is not None:
            dog.alive()
            if dog.waiting:
                self._tell_stalls(dog)

    def _tell_stalls(self, dog: Watchdog) -> None:
        rule = self._stall_rule()
        for stood, place, path in dog.take():
            if rule is not None:
                self.act(self.monitor.tell(rule.stalled(self.monitor.step, stood, place, path)))

    def _stall_rule(self) -> Any:
        """The rule that the watchdog works for, where it is selected."""
        return next((rule for rule in self.monitor.selection.rules.values() if hasattr(rule, "stalled")), None)

    def observe(self, snapshots: Iterable[Snapshot]) -> None:
        """Judge what has arrived; raises TrainingAborted when the user asked for that."""
        for snapshot in snapshots:
            self.monitor.observe(round_tables(snapshot))
            if snapshot.sampled:
                self._pace()
            if self.monitor.aborted_by is not None and not self._aborting:
                self.act(Action.ABORT)

    def act(self, action: Action) -> None:
        """Carry out what the monitor decided."""
        if action is Action.ABORT:
            finding = self.monitor.aborted_by
            assert finding is not None
            self._aborting = True
            good = finding.first_step - 1  # the weights since then are what the finding is about
            if self.monitor.last_good_step is not None and good < self.monitor.last_good_step:
                self.monitor.last_good_step = good if good >= 0 else None
            self.abort(f"{finding.code} {finding.name} at {finding.where or 'the run'}, step {finding.step}: {finding.message}")

    def abort(self, reason: str) -> None:
        """End the run for ``reason``: raise TrainingAborted, or ask the framework to stop. The first reason counts."""
        if self._asked_to_stop:
            return
        good = self.monitor.last_good_step
        reason += f". Last good step: {good}" if good is not None else ". No step before it was good"
        checkpoint = self.checkpoint(good)
        reason += f"; last checkpoint from before it: {checkpoint}" if checkpoint else ""
        if self.options.abort == "stop" and self._stop is not None:
            self.monitor.reason, self._asked_to_stop = reason, True
            self._stop()
            return
        self.end("aborted", reason)
        raise TrainingAborted(reason, self.monitor.report)

    def end(self, status: str = "finished", reason: str = "") -> None:
        """The run is over; the first call wins. Leaves nothing of ours behind."""
        if self.probe is not None:
            try:
                self.probe.close()
            except Exception:
                self.monitor.failed("closing the probe failed")
        if self._asked_to_stop and status == "finished":
            status, reason = "aborted", self.monitor.reason
        self._measure()
        self._unwatch()
        self.monitor.end(status, reason)
        self.alive = False

    def fail(self, what: str) -> None:
        """An error of ours (call it while handling the exception): measuring ends, training goes on."""
        self.monitor.failed(f"{what}: measuring was switched off")
        self.alive = False
        self._unwatch()
        if self.probe is not None:
            try:
                self.probe.close()
            except Exception:
                self.monitor.failed("closing the probe failed")

    def _unwatch(self) -> None:
        """The watchdog ends; what it saw is told, but ends no run that is over."""
        dog, self.watchdog = self.watchdog, None
        if dog is not None:
            dog.stop()
            rule = self._stall_rule()
            for stood, place, path in dog.take():
                if rule is not None and self.monitor.status == "running":
                    self.monitor.tell(rule.stalled(self.monitor.step, stood, place, path))

    def _pace(self) -> None:
        """On long runs full statistics may take 1 % of the time: while they take more, the interval between them doubles."""
        schedule, now, spent = self.monitor.schedule, time.perf_counter(), getattr(self.probe, "sampled_seconds", 0.0)
        self._samples += 1
        if self.options.every != "auto" or schedule.interval < LONG or self._samples < PACE:
            return
        if spent - self._mark[1] > SHARE * (now - self._mark[0]):
            schedule.slow_down()
        self._samples, self._mark = 0, (now, spent)

    def _measure(self) -> None:
        self.monitor.run_seconds = time.perf_counter() - self._started

    # ---- where it is told

    def _directory(self, default_dir: Callable[[], Path | None]) -> Path | None:
        given = self.options.log_dir
        try:
            root = Path(given) if given is not None else default_dir() or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
            return writable(root if root.name == SUBDIRECTORY else root / SUBDIRECTORY)
        except OSError as error:
            warnings.warn(f"trainvet writes no files: {error}", stacklevel=2)
            return None

    def _sinks(self, writes: bool) -> list[Sink]:
        if not writes:
            return []
        from trainvet.integrations.console import ConsoleSink

        sinks: list[Sink] = []
        if self.log_dir is not None:
            from trainvet.integrations.jsonl import JsonLinesSink
            from trainvet.integrations.tensorboard.sink import TensorBoardSink

            sinks += [TensorBoardSink(self.log_dir), JsonLinesSink(self.log_dir)]
        return [*sinks, ConsoleSink(self.log_dir)]


class HasSession(Protocol):
    """A callback with a session, or None outside a run."""

    _session: Session | None


H = TypeVar("H", bound=HasSession)


def guarded(hook: Callable[Concatenate[H, P], None]) -> Callable[Concatenate[H, P], None]:
    """A hook of a callback: skipped when there is no live session, timed, and fail-open (an abort passes through)."""

    @functools.wraps(hook)
    def run(self: H, *args: P.args, **kwargs: P.kwargs) -> None:
        session = self._session
        if session is None or not session.alive:
            return
        started = time.perf_counter()
        try:
            if session.watchdog is not None:
                session.life()
            hook(self, *args, **kwargs)
        except TrainingAborted:
            raise
        except Exception:
            session.fail(f"{hook.__name__} raised")
        finally:
            session.monitor.own_seconds += time.perf_counter() - started

    return run  # type: ignore[return-value]

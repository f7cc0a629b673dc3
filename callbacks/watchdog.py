"""A run that stands still: after so many seconds without a sign of life the stacks of all threads are kept, from a thread of its own."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

LONGEST_WAIT, TIMES = 30.0, 4
LATE = 3.0
INNERMOST = 4
log = logging.getLogger("trainvet")


class Watchdog:
    """Wakes rarely, touches nothing of the training, and is gone after :meth:`stop`.

    ``seconds`` without :meth:`alive` are a stall; it is told once, again only after a sign of life. ``pulse`` is for hooks that are too hot to call
    :meth:`alive`: it is read whenever the watchdog wakes, and life is where it has changed. ``told`` holds (seconds, place, path) until
    somebody takes them with :meth:`take`: ``place`` is where the watched thread stands, ``path`` the file with all stacks. Time during which the
    whole process was stopped (a suspended machine, a debugger) does not count, nor does a run that broke off without telling us: its ``fit`` is gone
    from the stack of the thread that called :meth:`start`.
    """

    def __init__(self, seconds: float, directory: Path | None) -> None:
        """``directory``: where the stacks are written; None: they are only logged."""
        self.seconds = seconds
        self.life = time.monotonic()
        self.pulse: Callable[[], object] | None = None
        self._beat: object = None
        self._directory = directory
        self._thread_id = threading.get_ident()
        self._fit: CodeType | None = None
        self._over = threading.Event()
        self._told: list[tuple[float, str, str]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on."""
        if self._thread is None:
            self._thread_id = threading.get_ident()
            self._fit = next((code for code in reversed(codes(sys._getframe(1))) if code.co_name == "fit"), None)
            self.alive()
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._over, self._period()), name="trainvet-watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def alive(self) -> None:
        """A sign of life: a step, a batch of an evaluation, a checkpoint."""
        self.life = time.monotonic()

    def take(self) -> list[tuple[float, str, str]]:
        """What was seen since the last call."""
        told, self._told = self._told, []
        return told

    @property
    def waiting(self) -> bool:
        """Is there anything to take?"""
        return bool(self._told)

    def _period(self) -> float:
        return min(LONGEST_WAIT, self.seconds / TIMES)

    def _feel(self, now: float) -> None:
        beat = None if self.pulse is None else self.pulse()
        if beat != self._beat:
            self._beat, self.life = beat, now

    def _stalled(self, stood: float) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [(names.get(ident, str(ident)), traceback.extract_stack(frame)) for ident, frame in frames.items() if ident != threading.get_ident()]
        own = frames.get(self._thread_id)
        if own is None or (self._fit is not None and self._fit not in codes(own)):
            return
        place = where(traceback.extract_stack(own))
        path = ""
        if self._directory is not None:
            file = self._directory / f"stalled-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            try:
                file.write_text("\n".join(f"thread {name}\n{''.join(stack.format())}" for name, stack in stacks), encoding="utf-8", errors="replace")
                path = str(file)
            except OSError:
                log.warning("trainvet: %s cannot be written", file)
        self._told.append((stood, place, path))
        log.warning("trainvet: no step for %.0f s; the training stands at %s%s", stood, place, f" (all threads: {path})" if path else "")


def codes(frame: FrameType | None) -> list[CodeType]:
    """The code of a frame and of all its callers, innermost first."""
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


def where(stack: traceback.StackSummary) -> str:
    """The innermost calls of a stack."""
    parts = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in reversed(stack[-INNERMOST:])]
    return " <- ".join(parts)


def _watch(of: Callable[[], Watchdog | None], over: threading.Event, period: float) -> None:
    """The thread. It holds no reference to the watchdog while it sleeps: a run that nobody knows of any more ends it."""
    told_at = -1.0
    slept = time.monotonic()
    while not over.wait(period):
        dog, now = of(), time.monotonic()
        if dog is None:
            return
        if now - slept > LATE * period + 5.0:  # nobody ran meanwhile, we neither
            dog.life = now
        slept = now
        dog._feel(now)
        stood = now - dog.life
        if stood >= dog.seconds and dog.life != told_at:
            told_at = dog.life
            dog._stalled(stood)
        del dog

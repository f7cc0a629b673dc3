"""A thread that writes, so that the training never waits for a disk."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

LIMIT = 256
PATIENCE = 5.0
_living: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Carries out what is submitted, in order, in one daemon thread.

    When ``limit`` calls wait, the oldest that may be dropped is dropped and counted; the others are always kept. An exception in a call
    ends the thread and is raised, once, by the next :meth:`submit` or :meth:`close`. In a forked child everything here is a no-op.
    """

    def __init__(self, limit: int = LIMIT, on_fork: Callable[[], None] | None = None) -> None:
        self.dropped = 0
        self.alive = True
        self._limit = limit
        self._on_fork = on_fork
        self._pid = os.getpid()
        self._calls: deque[tuple[Callable[[], None], bool]] = deque()
        self._ready = threading.Condition()
        self._ending = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        _living.add(self)

    def submit(self, call: Callable[[], None], droppable: bool = False) -> None:
        """Hand over a call; never waits for one to finish."""
        if not self.alive or self._pid != os.getpid():
            return
        self._raise()
        with self._ready:
            if len(self._calls) >= self._limit:
                self._drop()
            self._calls.append((call, droppable))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trainvet-writer", daemon=True)
                self._thread.start()
            self._ready.notify()

    def close(self, timeout: float = PATIENCE) -> bool:
        """Finish what waits, for at most ``timeout`` seconds; True if all was done. May be called twice."""
        if not self.alive or self._pid != os.getpid():
            return True
        self.alive = False
        with self._ready:
            self._ending = True
            self._ready.notify()
        if self._thread is not None:
            self._thread.join(timeout)
        self._raise()
        return self._thread is None or not self._thread.is_alive()

    def _drop(self) -> None:
        for index, (_, droppable) in enumerate(self._calls):
            if droppable:
                del self._calls[index]
                self.dropped += 1
                return

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self.alive = False
            raise RuntimeError("the writer thread ended") from error

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._calls and not self._ending:
                    self._ready.wait()
                if not self._calls:
                    return
                call, _ = self._calls.popleft()
            try:
                call()
            except BaseException as error:
                self._error = error
                self._calls.clear()
                return

    def _forked(self) -> None:
        """In a child process: the thread does not exist here, and its lock may be held for ever."""
        self.alive = False
        self._calls = deque()
        self._ready = threading.Condition()
        self._thread = None
        if self._on_fork is not None:
            with contextlib.suppress(Exception):
                self._on_fork()


def _after_fork() -> None:
    for background in list(_living):
        background._forked()


def _at_exit() -> None:
    for background in list(_living):
        with contextlib.suppress(Exception):
            background.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

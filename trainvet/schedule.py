"""When to look: densely at the start, then every N optimizer steps."""

from __future__ import annotations

from typing import Any

DENSE = 10
ASSUMED = 1000


class Schedule:
    """Says at which steps full statistics are taken.

    The first ``dense`` steps are all sampled, then every ``interval`` steps. With ``every="auto"`` the interval is
    min(50, max(1, planned // 60)); an unknown length counts as 1,000 steps, doubled when it is passed. ``slow_down`` doubles
    the interval (N * 2^k), for runs in which sampling costs more than it should.
    """

    def __init__(self, every: int | str = "auto", planned: int | None = None, dense: int = DENSE) -> None:
        """Raises ValueError unless ``every`` is "auto" or a whole number of at least 1."""
        if every != "auto" and not (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
            raise ValueError(f'every={every!r} must be "auto" or a whole number of steps, at least 1')
        self.every = every
        self.dense = dense
        self.factor = 1
        self._planned = planned
        self._assumed = ASSUMED
        self._start = 0
        self._next = 0

    def begin(self, planned: int | None, step: int = 0) -> None:
        """The run's length in optimizer steps, where it is known, and the step it starts or resumes at."""
        self._planned = planned
        self._start = step
        self._next = step

    @property
    def interval(self) -> int:
        """Steps between two samples after the dense start."""
        if isinstance(self.every, int):
            return self.every * self.factor
        return min(50, max(1, (self._planned or self._assumed) // 60)) * self.factor

    def due(self, step: int) -> bool:
        """Is ``step`` to be sampled? Asking does not count as sampling it."""
        return step - self._start < self.dense or step >= self._next

    def sampled(self, step: int) -> None:
        """``step`` was, or is being, sampled: set the next one. Late news of an earlier sample change nothing."""
        if self._planned is None:
            while step >= self._assumed:
                self._assumed *= 2
        self._next = max(self._next, step + self.interval)

    def slow_down(self) -> None:
        """Double the interval."""
        self.factor *= 2

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"factor": self.factor, "assumed": self._assumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.factor, self._assumed = int(state["factor"]), int(state["assumed"])

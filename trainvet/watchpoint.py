"""A user's own threshold on any statistic, without writing a class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainvet.finding import Finding, Severity
from trainvet.meaning import MEANING, is_known, nearest, share_inside
from trainvet.rule import Rule, Streak, matches
from trainvet.statistics import Snapshot, Vector


class Watchpoint(Rule):
    """
    ## What it checks
    A statistic is above, below or outside a range on ``patience`` consecutive samples, for the subjects that ``where`` matches.
    ## Why it matters
    You know a number of your own run better than any general rule can.
    ## What to do
    Whatever made you set it.
    ## Known limits
    Statistics that are not series are seen on sampled steps only.
    """

    sees_poison = True

    def __init__(
        self,
        statistic: str,
        *,
        above: float | None = None,
        below: float | None = None,
        outside: tuple[float, float] | None = None,
        inside: tuple[float, float] | None = None,
        where: str = "*",
        patience: int = 1,
        until: int | None = None,
        severity: str | Severity = Severity.WARNING,
        name: str = "",
    ) -> None:
        """``Watchpoint("gradient.abs_max", above=1e3, where="encoder.*", patience=3, severity="error")``.

        ``inside=(low, high)`` judges the share of elements in that range: ``Watchpoint("activation.share", inside=(-1, 0), above=0.999)``.
        "weight.range" is the largest minus the smallest value. ``until`` is the last step that is judged (0: the first one only). NaN counts as
        beyond every limit. Raises ValueError for an unknown statistic, no limit, an impossible range or patience.
        """
        target, _, part = statistic.partition(".")
        if (part == "share") != (inside is not None):
            raise ValueError(f'Watchpoint({statistic!r}): a share needs inside=(low, high), and inside= a share, such as "activation.share"')
        self._range = part == "range" and {f"{target}.max", f"{target}.min"} <= MEANING.keys()
        key = share_inside(target, *inside) if inside is not None else statistic
        if not self._range and not is_known(key):
            raise ValueError(f"unknown statistic {statistic!r}; did you mean {nearest(statistic)}?")
        if sum(limit is not None for limit in (above, below, outside)) == 0:
            raise ValueError(f"Watchpoint({statistic!r}) needs a limit: above=, below= or outside=(low, high)")
        if outside is not None and (above is not None or below is not None):
            raise ValueError(f"Watchpoint({statistic!r}): give outside=, or above= and below=, not both")
        low, high = outside if outside is not None else (below, above)
        if not all(limit is None or np.isfinite(limit) for limit in (low, high)) or (low is not None and high is not None and not low < high):
            raise ValueError(f"Watchpoint({statistic!r}): what is allowed must lie between two finite limits, low < high, not {low!r} and {high!r}")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(f"patience={patience!r} must be a whole number of at least 1")
        if until is not None and (not isinstance(until, int) or isinstance(until, bool) or until < 0):
            raise ValueError(f"until={until!r} must be a step, at least 0")
        self.statistic, self.where, self.patience, self.until = key, where, patience, until
        self.low, self.high = low, high
        self.level = Severity.parse(severity)
        self.label = name or f"watchpoint-{statistic}"
        self.reads = frozenset({f"{target}.max", f"{target}.min"} if self._range else {key})  # type: ignore[misc]
        self.severity = self.level  # type: ignore[misc]
        self.code = "WP100"  # type: ignore[misc]
        self._streak = Streak(patience)

    @property
    def name(self) -> str:
        """The name given, or one made from the statistic."""
        return self.label

    def validate(self) -> None:
        """Everything was checked at construction."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Judge a sampled column, or every row of a series."""
        if self._range:
            target = self.statistic.partition(".")[0]
            top, bottom = snapshot.column(f"{target}.max"), snapshot.column(f"{target}.min")
            column = None if top is None or bottom is None else (top[0], top[1] - bottom[1])
        else:
            column = snapshot.column(self.statistic)
        if column is not None:
            yield from self._judge(column[0], column[1], snapshot.step)
        for name, track in snapshot.tracks(self.statistic).items():
            for step, value in zip(track.steps.tolist(), track.values, strict=True):
                yield from self._judge((name,), np.array([value]), step)

    def _judge(self, names: tuple[str, ...], vector: Vector, step: int) -> Iterable[Finding]:
        if self.until is not None and step > self.until:
            return
        inside = np.ones(len(vector), dtype=bool)
        if self.low is not None:
            inside &= vector >= self.low
        if self.high is not None:
            inside &= vector <= self.high
        chosen = np.array([matches(self.where, name) for name in names], dtype=bool)
        due = self._streak.update(names, chosen & ~inside, step)
        if due:
            limit = f"{'' if self.low is None else f'at least {self.low:g} '}{'' if self.high is None else f'at most {self.high:g}'}".strip()
            worst = due[int(np.argmax(np.abs(np.nan_to_num(vector[due], nan=np.inf))))]
            yield self.finding(
                step,
                f"{self.statistic} is {vector[worst]:.4g} at {names[worst]}, set to be {limit}",
                first_step=min(self._streak.first(names[position]) for position in due),
                subjects=[names[position] for position in due],
                evidence={self.statistic: float(vector[worst])},
                threshold=limit,
            )

    def state_dict(self) -> dict[str, Any]:
        """The running streaks."""
        return self._streak.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak.load_state_dict(state)

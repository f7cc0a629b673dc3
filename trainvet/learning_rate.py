"""The learning rate of each parameter group as far as it was seen: its present value, its peak, and whether it rises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainvet.statistics import Facts, Snapshot, Track, Vector

RISE = 1e-6


class LearningRate:
    """What several rules ask of "optimizer.learning_rate".

    The peak is the highest rate seen so far, or the highest one that the simulated schedule is going to reach: a rate on its way up is
    then known to be far from its peak. ``rising`` compares with the sampled snapshot before this one.
    """

    def __init__(self) -> None:
        self._group: dict[str, str] = {}
        self._betas: tuple[float, ...] = ()
        self._planned: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._peak: dict[str, float] = {}
        self._mark: dict[str, float] = {}
        self._rising: dict[str, bool] = {}
        self._of: tuple[Sequence[str], list[str], npt.NDArray[np.int64]] | None = None
        self._before: dict[str, float] = {}
        self._tracks: Mapping[str, Track] = {}

    def begin(self, facts: Facts) -> None:
        """Which group each parameter belongs to, and how high its schedule will go."""
        self._of = None
        self._group = {name: subject.group for name, subject in facts.parameters.items()}
        self._planned = {item.group: float(np.nanmax(item.curve)) for item in facts.schedules if len(item.curve) and np.isfinite(item.curve).any()}
        self._betas = next((item.betas for item in facts.optimizers if item.family == "adam" and len(item.betas) > 1), ())

    def follow(self, snapshot: Snapshot, until: int | None = None) -> None:
        """Take over the rates of a snapshot, or only those up to the step ``until``; call it with every snapshot."""
        self._before, self._tracks = dict(self._now), snapshot.tracks("optimizer.learning_rate")
        for group, track in snapshot.tracks("optimizer.learning_rate").items():
            finite = track.values[np.isfinite(track.values) & (track.steps <= (snapshot.step if until is None else until))]
            if len(finite):
                self._now[group] = float(finite[-1])
                self._peak[group] = max(self._peak.get(group, 0.0), float(finite.max()))
        if snapshot.sampled and until is None:
            for group, now in self._now.items():
                before = self._mark.get(group)
                self._rising[group] = before is not None and now > before * (1 + RISE)
                self._mark[group] = now

    def at(self, step: int) -> float:
        """The highest rate of any group in force at ``step``, a step of the snapshot followed last; NaN where none is known."""
        known = dict(self._before)
        for group, track in self._tracks.items():
            row = int(np.searchsorted(track.steps, step, side="right")) - 1
            if row >= 0:
                known[group] = float(track.values[row])
        return max((rate for rate in known.values() if np.isfinite(rate)), default=np.nan)

    @property
    def planned(self) -> float:
        """The highest rate that a simulated schedule is going to reach; 0 where there is none."""
        return max(self._planned.values(), default=0.0)

    def of(self, names: Sequence[str]) -> Vector:
        """The present rate of each parameter's group, float64 [S]; NaN where it is not known."""
        groups, index = self._groups(names)
        return np.array([self._now.get(group, np.nan) for group in groups])[index]

    def settled(self, names: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
        """bool [S]: the parameter's rate is known, above 0, at least ``share`` of its peak, and not rising."""
        groups, index = self._groups(names)
        settled: npt.NDArray[np.bool_] = np.array([self._settled(group, share) for group in groups], dtype=bool)[index]
        return settled

    def advice(self, factor: float, names: Sequence[str] | None = None, step: int | None = None) -> str:
        """ "set the learning rate to about 2e-05 (now 0.01)", for the largest rate among ``names`` or of all (at ``step``); without numbers where
        none is known."""
        rates = self.of(names) if names is not None else np.array(list(self._now.values()) if step is None else [self.at(step)])
        rate = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
        if rate > 0 and 0 < factor < np.inf:
            return f"set the learning rate to about {rate * factor:.1g} (now {rate:.3g})"
        return "lower the learning rate" if factor < 1 else "raise the learning rate"

    def stated(self, names: Sequence[str]) -> str:
        """ " at a learning rate of 0.01", the largest among ``names``; empty where none is known."""
        rates = self.of(names)
        return f" at a learning rate of {float(np.nanmax(rates)):.3g}" if len(rates) and np.isfinite(rates).any() else ""

    def warm_up(self) -> str:
        """The warm-up to suggest: 2/(1 - beta2) steps for the Adam family (Ma and Yarats 2021)."""
        if self._betas and 0 < self._betas[1] < 1:
            return f"warm the learning rate up over {round(2 / (1 - self._betas[1]))} steps, 2/(1-beta2)"
        return "warm the learning rate up over the first steps"

    def _groups(self, names: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """The groups and, for each name, the index of its group; looked up anew only for other names."""
        if self._of is None or self._of[0] is not names:
            known = [self._group.get(name, "") for name in names]
            groups = list(dict.fromkeys(known))
            place = {group: index for index, group in enumerate(groups)}
            self._of = names, groups, np.array([place[group] for group in known], dtype=np.int64)
        only = next(iter(self._now)) if len(self._now) == 1 else None
        return [only if only is not None and group not in self._now else group for group in self._of[1]], self._of[2]

    def _settled(self, group: str, share: float) -> bool:
        now = self._now.get(group, 0.0)
        return now > 0 and now >= share * max(self._peak[group], self._planned.get(group, 0.0)) and not self._rising.get(group, False)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers by group."""
        return {"now": dict(self._now), "peak": dict(self._peak), "mark": dict(self._mark)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._now, self._peak, self._mark = dict(state["now"]), dict(state["peak"]), dict(state["mark"])

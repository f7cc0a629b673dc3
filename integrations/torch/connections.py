"""Which trainable parameters the loss does not depend on, read from its autograd graph, and which operation cut them off."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.severance import Cut, Tracer
from trainvet.statistics import Severance

STEPS = 10  # attempts over which a parameter must stay without a path before it is told
WALKS = 2  # so many must have found everything before no more are made
SECONDS, EVERY = 0.25, 512  # a walk takes no longer; how often the clock is looked at
# autograd nodes whose derivative is 0 everywhere: there is a path, and nothing comes through
ZERO = frozenset({"RoundBackward0", "RoundBackward1", "FloorBackward0", "CeilBackward0", "TruncBackward0", "SignBackward0", "SgnBackward0"})


class TooLongError(Exception):
    """A graph could not be walked in time."""


class Reach:
    """The leaves that some autograd nodes depend on: ids of tensors, on any path, and those on a path that lets a gradient through."""

    def __init__(self) -> None:
        self.any: set[int] = set()
        self.live: set[int] = set()

    def add(self, roots: Iterable[Any], seconds: float = SECONDS) -> None:
        """Walk from ``roots``. Raises TooLongError."""
        until = time.perf_counter() + seconds
        stack = [(node, True) for node in roots if node is not None]
        seen_live: set[Any] = set()
        seen: set[Any] = set()
        count = 0
        while stack:
            node, live = stack.pop()
            if node in seen_live or (not live and node in seen):
                continue
            (seen_live if live else seen).add(node)
            count += 1
            if count % EVERY == 0 and time.perf_counter() > until:
                raise TooLongError
            name = type(node).__name__
            if name == "AccumulateGrad":
                key = id(node.variable)
                self.any.add(key)
                if live:
                    self.live.add(key)
                continue
            through = live and name not in ZERO and not (name.startswith("DivBackward") and getattr(node, "_saved_rounding_mode", None) is not None)
            for child, _ in node.next_functions:
                if child is not None:
                    stack.append((child, through))


class Connections:
    """Walks the loss's graph on the first sampled steps, as long as some parameter is missing in it.

    A parameter counts as disconnected when no walk found it and none of those steps gave it a gradient other than 0 (checkpointing and custom
    functions hide what they hold), over :data:`STEPS` attempts. One whose value moves without a gradient is kept up by the user (an average
    of other weights) and does not count. Only when something is missing, one forward is traced for the operation that cut it off.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        """``paths``: module id -> dotted path."""
        self.disconnected: tuple[str, ...] = ()
        self.severed: tuple[Severance, ...] = ()
        self.done = False
        self._paths = paths
        self._tracer: Tracer | None = None
        self._cuts: list[Cut] | None = None
        self._reach: Reach | None = None
        self._lacking: dict[int, tuple[set[str], set[str]]] = {}
        self._first: int | None = None
        self._walks: dict[str, int] = {}
        self._absent: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._averages: set[str] = set()

    # ---- the step, in order

    def start(self) -> None:
        """The first forward of a sampled step begins."""
        self.stop()
        if self.done:
            return
        self._reach = Reach()
        if self._dead and self._cuts is None:
            self._tracer = Tracer(self._paths)
            self._tracer.start()

    def loss(self, value: Tensor) -> None:
        """A loss of the step is about to be differentiated, or just was."""
        reach, tracer = self._reach, self._tracer
        if tracer is not None:
            tracer.pause()
        if reach is None or not value.requires_grad:
            return
        if value.grad_fn is not None:
            reach.add([value.grad_fn])
        if tracer is not None:
            self._tracer = None
            if tracer.error is not None:
                raise tracer.error
            self._cuts = tracer.cuts(value)
            for cut in self._cuts:
                behind = Reach()
                behind.add(cut.nodes)
                cut.leaves |= behind.any
                cut.nodes = []

    def pause(self) -> None:
        """The forward is over."""
        if self._tracer is not None:
            self._tracer.pause()

    def stop(self) -> None:
        """Nothing of ours stays, and no graph is held."""
        if self._tracer is not None:
            self._tracer.pause()
        self._tracer = self._reach = None

    def gradients(self, attempt: Attempt) -> None:
        """The gradients of an optimizer step are complete."""
        reach = self._reach
        if reach is None or not attempt.losses:
            return
        named = list(zip(attempt.owned.names, attempt.owned.tensors, strict=True))
        absent = {name for name, parameter in named if id(parameter) not in reach.any}
        dead = {name for name, parameter in named if id(parameter) not in reach.live}
        for cut in self._cuts or ():
            cut.parameters.update(name for name, parameter in named if id(parameter) in cut.leaves)
        for name, parameter in named:
            if name in dead and parameter.grad is None:
                self._watch(name, parameter)
        self._lacking[attempt.step] = absent, dead

    def arrived(self, attempt: Attempt) -> bool:
        """The norms of a step are known. True when this settles what is disconnected, and some of it is."""
        if self.done or attempt.step not in self._lacking:
            return False
        absent, dead = self._lacking.pop(attempt.step)
        names, norms = attempt.owned.names, attempt.host_norms
        silent = {name for name, norm in zip(names, norms.tolist(), strict=True) if norm == 0}
        self._first = attempt.step if self._first is None else self._first
        for name in names:
            self._walks[name] = self._walks.get(name, 0) + 1
        for counts, lacking in ((self._absent, absent), (self._dead, dead)):
            for name in lacking & silent - self._averages:
                counts[name] = counts.get(name, 0) + 1
        if not self._never(self._dead):
            self.done = all(count >= WALKS for count in self._walks.values())
            return False
        if attempt.step - self._first < STEPS - 1:
            return False
        self.done = True
        self.disconnected = self._never(self._absent)
        self.severed = self._severed(frozenset(self._never(self._dead)))
        return bool(self.disconnected or self.severed)

    # ---- inside

    def _never(self, counts: dict[str, int]) -> tuple[str, ...]:
        """Names that were lacking in every walk so far."""
        return tuple(name for name, walks in self._walks.items() if counts.get(name) == walks and name not in self._averages)

    def _severed(self, gone: frozenset[str]) -> tuple[Severance, ...]:
        found, explained = [], set[str]()
        for cut in sorted(self._cuts or (), key=lambda cut: cut.outside):
            parameters = cut.parameters & gone
            if cut.outside:  # only where nothing inside torch explains it
                parameters -= explained
            if parameters:
                explained |= parameters
                found.append(Severance(cut.operation, cut.module, cut.source, tuple(name for name in self._walks if name in parameters)))
        return tuple(found)

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        """Without a gradient no optimizer moves it; when it moves, the user does."""
        flat = parameter.detach().reshape(-1)
        value = float(flat[:: max(1, flat.numel() // 64)].double().abs().sum())
        if self._values.setdefault(name, value) != value:
            self._averages.add(name)

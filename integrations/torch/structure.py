"""What sampled steps show of a model's structure: layers, calls of modules, what the loss is connected to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainvet.integrations.torch.attempt import Attempt
from trainvet.integrations.torch.connections import Connections, TooLongError
from trainvet.integrations.torch.layers import Wiring, broken_ties, describe_layers, initial, pretrained, shared_modules
from trainvet.integrations.torch.modules import Calls, Roster
from trainvet.integrations.torch.plan import Plan
from trainvet.statistics import Layer, Subject


class Structure:
    """Stands beside the look of a sampled step. ``news``: the facts have changed. ``error``: an error of ours, after which nothing is watched."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.news = False
        self.error: Exception | None = None
        self.roster = Roster(plan.module, plan.modules)
        self._pretrained, self._initial = pretrained(plan.module), initial(plan.module)
        self._layers: tuple[Layer, ...] = ()
        self._shared: tuple[str, ...] = ()
        self._ties: tuple[str, ...] = ()
        self._autocast = ""
        self._connections = Connections(plan.modules)
        self._calls: Calls | None = None
        self._wiring: Wiring | None = None
        self._wired = self._over = False

    def replan(self, plan: Plan) -> None:
        """The plan has changed: the next sampled forward is traced again."""
        self.plan, self._wired = plan, False
        before, self._connections = self._connections, Connections(plan.modules)
        before.stop()
        self._connections.disconnected, self._connections.severed = before.disconnected, before.severed  # until there is a new verdict
        self.roster = Roster(plan.module, plan.modules)

    def facts(self) -> dict[str, Any]:
        """The fields of Facts that are learnt here."""
        return {
            "layers": self._layers,
            "shared_modules": self._shared,
            "broken_ties": self._ties,
            "autocast": self._autocast,
            "pretrained": self._pretrained,
            "initial": self._initial,
            "disconnected": self._connections.disconnected,
            "severed": self._connections.severed,
        }

    def subjects(self) -> tuple[Subject, ...]:
        """The modules that have a row."""
        return tuple(self.roster.subjects(self.plan.depth))

    # ---- the step, in order

    def start(self, want: frozenset[str], first: bool) -> None:
        """A forward of a sampled step begins; ``first`` of the step: the others are only counted."""
        if self.error is not None:
            return
        if self._calls is None and (not self._wired or any(key.startswith("module.") for key in want)):
            self._calls = Calls(self.roster, next((tensor.device.type for tensor in self.plan.parameters.values()), "cpu"))
        if self._calls is not None:
            self._calls.start()
        if first and not self._wired and self._wiring is None:
            self._wiring = Wiring(self.plan.modules)
            self._wiring.start()
        if first:
            self._connections.start()

    def pause(self, more: bool = False) -> None:
        """The forward is over; ``more``: another one of the same step may follow without being announced."""
        self._connections.pause()
        if self._wiring is not None and not more:
            self._wiring.stop()
        if self._calls is not None and not more:
            self._calls.pause()

    def stop(self) -> None:
        """Nothing of ours stays."""
        self.pause()
        self._connections.stop()
        self._calls = self._wiring = None

    def loss(self, value: Tensor) -> None:
        """A loss of the step is about to be differentiated, or just was."""
        try:
            self._connections.loss(value)
        except TooLongError:  # too large a graph to be walked beside a training
            self._connections.stop()
            self._connections.done = True
        except Exception as error:
            self.error = error

    def gradients(self, attempt: Attempt) -> None:
        """The gradients of an optimizer step are complete."""
        self._connections.gradients(attempt)

    def arrived(self, attempt: Attempt) -> None:
        """The numbers of a sampled step are on the host."""
        self.news = self._connections.arrived(attempt) or self.news

    def counted(self, attempt: Attempt, want: frozenset[str]) -> None:
        """The batch is over: the table "module"."""
        self._over = True
        calls, self._calls = self._calls, None
        if calls is None:
            return
        calls.pause()
        if calls.error is not None:
            self.error = calls.error
            return
        if calls.autocast and calls.autocast != self._autocast:
            self._autocast, self.news = calls.autocast, True
        table = calls.table()
        if table is not None:
            attempt.names["module"] = table.names
            attempt.constant |= {("module", key): column for key, column in table.columns.items() if f"module.{key}" in want}

    def traced(self) -> None:
        """The look has taught the plan its depths: once the batch is over, what the traced forward shows becomes facts."""
        if not self._over:
            return
        self._over = False
        wiring, self._wiring = self._wiring, None
        if wiring is None:
            return
        wiring.stop()
        if wiring.error is not None:
            self.error = wiring.error
            return
        if not wiring.called:
            return  # the forward did not show
        self._wired = True
        found = (
            describe_layers(self.plan.module, wiring, self.plan.depth),
            shared_modules(self.plan.module, wiring.called),
            broken_ties(self.plan.module),
        )
        if found != (self._layers, self._shared, self._ties):
            self._layers, self._shared, self._ties = found
            self.news = True

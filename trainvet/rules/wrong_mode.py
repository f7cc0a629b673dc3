"""MO104: dropout or batch normalisation in evaluation mode while training, or in training mode while evaluating."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from trainvet.finding import Finding, Severity
from trainvet.rule import Rule
from trainvet.statistics import Facts, Layer, Snapshot

MODAL = ("dropout", "batch_norm")


@dataclasses.dataclass
class WrongMode(Rule):
    """
    ## What it checks
    The mode of dropout and batch-normalisation layers: evaluation mode in the training forward of ``patience`` sampled steps in a row is an error,
    training mode during an evaluation a warning.
    ## Why it matters
    In evaluation mode dropout does nothing and running statistics are used and never updated: the loss falls nicely, and the model is another one
    than was meant. In training mode an evaluation is noisy, depends on its batches, and changes the statistics.
    ## What to do
    Call `train()` before the training step; look for a helper that calls `eval()` and does not call `train()` again.
    ## Known limits
    Left alone: layers whose own or neighbouring parameters are all frozen, dropout of rate 0, and runs with a finetuning callback. In a model with
    loaded weights batch normalisation in evaluation mode is information. Monte-Carlo dropout during an evaluation is to be muted by name.
    """

    code = "MO104"
    reads: ClassVar[frozenset[str]] = frozenset({"module.training", "module.called", "validation_module.training"})
    severity: ClassVar[Severity] = Severity.ERROR
    causes = ("eval() is called, for a validation or by a helper, and train() is not called again", "the layers are called with training=False")
    fixes = ("call train() on the module before the training step", "call eval() before an evaluation")

    patience: int = 3

    def __post_init__(self) -> None:
        self._facts = Facts()
        self._trains: dict[str, bool] = {}
        self._layers: dict[str, Layer] = {}
        self._streak: dict[str, list[int]] = {}
        self._told: set[str] = set()
        self._seen = False

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Which layers change with the mode, and which may be in evaluation mode."""
        self._facts = facts
        trains: dict[str, bool] = {}  # what no optimizer holds does not train either: a teacher, a network that only scores
        for name, subject in facts.parameters.items():
            parts = name.split(".")
            for length in range(len(parts)):
                place = ".".join(parts[:length])
                trains[place] = trains.get(place, False) or (subject.trainable and (not facts.owned or name in facts.owned))
        self._trains = trains
        self._layers = {
            layer.name: layer
            for layer in facts.layers
            if layer.kind in MODAL and not (layer.kind == "dropout" and layer.rate <= 0) and not self._frozen(layer)
        }
        return ()

    def _frozen(self, layer: Layer) -> bool:
        """Do all parameters of its own, else of the nearest module around it that has some, stand still?"""
        place = layer.name
        while place not in self._trains and place:
            place = place.rpartition(".")[0]
        return not self._trains.get(place, True)

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """A training step, or an evaluation."""
        if not self._layers or self._facts.finetuning:
            return
        column = snapshot.column("module.training")
        if column is not None and self._seen and not (column[1] == 0).any():  # the usual case, at no cost per layer
            self._streak = {}
        elif column is not None:
            modes = dict(zip(column[0], column[1].tolist(), strict=True))
            called = dict(zip(column[0], snapshot.values("module.called", column[0]).tolist(), strict=True))
            wrong = [name for name in self._layers if modes.get(name) == 0 and not called.get(name, 1.0) <= 0]
            self._seen = self._seen or bool(self._layers.keys() & modes.keys())
            self._streak = {name: [*self._streak.get(name, [snapshot.step, 0])] for name in wrong}
            for counted in self._streak.values():
                counted[1] += 1
            due = [name for name in wrong if self._streak[name][1] >= self.patience and name not in self._told]
            if due:
                yield self._in_training(snapshot.step, due, modes)
        column = snapshot.column("validation_module.training")
        if column is not None and (column[1] == 1).any():
            modes = dict(zip(column[0], column[1].tolist(), strict=True))
            wrong = [name for name in self._layers if modes.get(name) == 1 and f"evaluation {name}" not in self._told]
            if wrong:
                yield self._in_evaluation(snapshot.step, wrong)

    def _in_training(self, step: int, names: list[str], modes: Mapping[str, float]) -> Finding:
        self._told |= set(names)
        place = around(names, modes)
        statistics = [name for name in names if self._layers[name].kind == "batch_norm"]
        mild = self._facts.pretrained and len(statistics) == len(names)
        what = " and ".join(kind for kind, some in (("dropout", len(names) > len(statistics)), ("batch normalisation", bool(statistics))) if some)
        return self.finding(
            step,
            f"{what} ran in evaluation mode in the training forward" + (f": {place} is switched to it" if place else ""),
            first_step=min(self._streak[name][0] for name in names),
            subjects=(place,) if place else self._facts.upstream_first(names),
            severity=Severity.INFO if mild else Severity.ERROR,
            evidence={"layers": len(names), "first": names[0]},
            threshold=f"training mode, {self.patience} samples in a row",
            fixes=(f"call {place}.train() before the training step" if place else self.fixes[0], "look for eval() inside the training step"),
        )

    def _in_evaluation(self, step: int, names: list[str]) -> Finding:
        self._told |= {f"evaluation {name}" for name in names}
        return self.finding(
            step,
            f"{self._layers[names[0]].kind.replace('_', ' ')} {names[0]} ran in training mode during an evaluation",
            subjects=self._facts.upstream_first(names),
            severity=Severity.WARNING,
            evidence={"layers": len(names)},
            threshold="evaluation mode",
            causes=("eval() was not called before the evaluation", "the layers are called with training=True"),
            fixes=("call eval() before an evaluation and train() after it",),
        )

    def missing(self) -> str:
        """Whether there is a layer that changes with the mode."""
        if self._facts.layers and not self._layers:
            return "no dropout or batch normalisation that trains"
        return "" if self._seen else "a traced training step with dropout or batch normalisation"

    def state_dict(self) -> dict[str, Any]:
        """The streaks, and what was told."""
        return {"streak": {name: list(item) for name, item in self._streak.items()}, "told": sorted(self._told), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._streak = {str(name): [int(value) for value in item] for name, item in state["streak"].items()}
        self._told, self._seen = set(state["told"]), bool(state["seen"])


def around(names: Sequence[str], modes: Mapping[str, float]) -> str:
    """The outermost module around all ``names`` of which nothing is in training mode; empty where there is none."""
    parts = [name.split(".")[:-1] for name in names]
    shared = [same[0] for same in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    for length in range(1, len(shared) + 1):
        place = ".".join(shared[:length])
        if all(mode == 0 for name, mode in modes.items() if name.startswith(f"{place}.")):
            return place
    return ""

"""Faults that are put into healthy recipes: what is changed, what a right diagnosis of it is, and which place is the right one."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.detection.setup import Setup

# what too large steps are told by: whichever of these comes first, if it speaks of the rate
RUNAWAY = {"WT104", "WT105", "WT110", "LO101", "LO102", "GR101", "GR103", "LR101", "LR103", "LR105", "NF101", "AC101"}
STANDSTILL = {"WT106", "LO104", "LO107", "LR101", "LR102"}


@dataclasses.dataclass(frozen=True)
class Operator:
    """One fault.

    ``codes`` are the findings that name it rightly. ``about`` is the right place in words, looked for in a finding's place, message, first cause
    and first advice; where the fault has a place in the model, ``put`` notes its names in ``setup.mark``, and only these count.
    ``cure`` are the repairs (see ``fixes``) that take it out again. ``structural``: a fault whatever the score says.
    """

    name: str
    put: Callable[[Setup], None]
    codes: frozenset[str]
    about: str
    applies: Callable[[Setup], bool]
    structural: bool
    cure: str

    def placed(self, setup: Setup, finding: Mapping[str, Any]) -> bool:
        """Is the finding's place the right one?"""
        names = " ".join([finding["where"], *finding["subjects"]])
        words = " ".join([names, finding["message"], *finding["causes"][:1], *finding["fixes"][:1]])
        return bool(re.search(setup.mark, names) if setup.mark else re.search(self.about, words, re.IGNORECASE))

    def onset(self, setup: Setup) -> int:
        """The first step at which the fault can show."""
        return setup.start


class Catalogue(dict[str, Operator]):
    """Operators by name; :meth:`add` is a decorator for the functions that put a fault in."""

    def add(
        self, codes: set[str], about: str, cure: str, applies: Callable[[Setup], bool] = lambda setup: True, structural: bool = False
    ) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
        """Take a function up as an operator under its own name."""

        def enter(put: Callable[[Setup], None]) -> Callable[[Setup], None]:
            name = put.__name__.replace("_", "-")
            fits = lambda setup: not setup.players and applies(setup)  # noqa: E731
            self[name] = Operator(name, put, frozenset(codes), about, fits, structural, cure)
            return put

        return enter


@functools.cache
def of(side: str) -> Catalogue:
    """The operators of a side ("torch" or "keras"): those on settings and data, and its own on models."""
    shared = importlib.import_module("benchmarks.detection.operators_settings").SHARED
    own = importlib.import_module(f"benchmarks.detection.operators_{side}").OWN
    return Catalogue({**shared, **own})

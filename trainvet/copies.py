"""Modules that repeat another one, as teachers, target networks and moving averages do: what is odd elsewhere is meant there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def repeats(place: str, names: Sequence[str], shapes: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """Is the module ``place`` a copy of a trained one: the same names and shapes under a name that differs in more than a number?"""
    if len({name.rpartition(".")[0] for name in names}) < 2:
        return False
    tails = {name[len(place) + 1 :]: shapes[name] for name in names}
    first = next(iter(tails))
    stems = [name[: len(name) - len(first)] for name in held if f".{name}".endswith(f".{first}")]
    numberless = re.sub(r"\d+", "", place)
    return any(
        re.sub(r"\d+", "", stem.rstrip(".")) != numberless and all(held.get(stem + tail) == shape for tail, shape in tails.items()) for stem in stems
    )

"""Every hook we define is one that Lightning calls: a misspelt or renamed one would never run, and nobody would notice."""

from __future__ import annotations

import inspect

import pytest
from lightning.pytorch import Callback

from trainvet.callbacks import lightning as ours

CLASSES = [kind for kind in vars(ours).values() if inspect.isclass(kind) and issubclass(kind, ours.Diagnostics)]
USED = {
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_end",
    "on_exception",
}


def public(kind: type) -> dict[str, object]:
    """What a class and our own classes above it define, without the private."""
    own = [above for above in kind.__mro__ if above.__module__.startswith("trainvet.")]
    return {name: value for above in own for name, value in vars(above).items() if inspect.isfunction(value) and not name.startswith("_")}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_hook_exists_in_lightning(kind: type) -> None:
    hooks = {name for name in public(kind) if name.startswith(("on_", "setup", "teardown")) or name.endswith("state_dict")}
    assert hooks >= USED
    assert {name for name in hooks if not hasattr(Callback, name)} == set()


@pytest.mark.parametrize("name", sorted(name for name in public(ours.Diagnostics) if hasattr(Callback, name)))
def test_every_hook_takes_what_lightning_hands_over(name: str) -> None:
    theirs = list(inspect.signature(getattr(Callback, name)).parameters)
    mine = list(inspect.signature(getattr(ours.Diagnostics, name)).parameters)
    assert mine[: len(theirs)] == theirs


def test_the_classes_are_the_six_focused_ones_and_all_of_it() -> None:
    assert len(CLASSES) == 7

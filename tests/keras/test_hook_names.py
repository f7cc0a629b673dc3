"""Every hook we define is one that Keras calls: a misspelt or renamed one would never run, and nobody would notice."""

from __future__ import annotations

import inspect

import keras
import pytest

from trainvet.callbacks import keras as ours

CLASSES = [kind for kind in vars(ours).values() if inspect.isclass(kind) and issubclass(kind, ours.Diagnostics)]


def public(kind: type) -> dict[str, object]:
    """What a class and our own classes above it define, without the private."""
    own = [above for above in kind.__mro__ if above.__module__.startswith("trainvet.")]
    return {name: value for above in own for name, value in vars(above).items() if inspect.isfunction(value) and not name.startswith("_")}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_hook_exists_in_keras(kind: type) -> None:
    hooks = {name for name in public(kind) if name.startswith(("on_", "set_"))}
    assert hooks >= {"on_train_begin", "on_train_end"}
    assert {name for name in hooks if not hasattr(keras.callbacks.Callback, name)} == set()


@pytest.mark.parametrize("name", sorted(name for name in public(ours.Diagnostics) if hasattr(keras.callbacks.Callback, name)))
def test_every_hook_takes_what_keras_hands_over(name: str) -> None:
    theirs = list(inspect.signature(getattr(keras.callbacks.Callback, name)).parameters)
    mine = list(inspect.signature(getattr(ours.Diagnostics, name)).parameters)
    assert mine[: len(theirs)] == theirs


def test_the_classes_are_the_six_focused_ones_and_all_of_it() -> None:
    assert len(CLASSES) == 7

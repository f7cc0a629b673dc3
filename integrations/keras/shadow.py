"""Attributes of a user's object that are replaced for the length of one training step, and are gone after it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

_MISSING = object()


class Shadows:
    """Puts functions in front of an object's own through its ``__dict__`` and takes them away again.

    Writing to ``__dict__`` goes past Keras' attribute tracking, so nothing of ours can be found, saved or counted as a part of the model.
    Used as a context manager, so that an exception inside the step leaves nothing behind.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name`` is ``value`` until :meth:`remove`."""
        attributes: dict[str, Any] = owner.__dict__
        self._undo.append((attributes, name, attributes.get(name, _MISSING)))
        attributes[name] = value

    def remove(self) -> None:
        """Everything is as it was, last change first."""
        while self._undo:
            attributes, name, before = self._undo.pop()
            if before is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = before

    def __enter__(self) -> Shadows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

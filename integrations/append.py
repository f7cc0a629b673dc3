"""Append to a file so that it always ends with a whole record, also when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_append(path: Path, new: bool = False) -> int:
    """A file descriptor for appending without a buffer in this process; with ``new`` the file must not exist yet. Raises OSError."""
    return os.open(path, FLAGS | (os.O_EXCL if new else 0), 0o644)


def append(fd: int, data: bytes) -> None:
    """Write all of ``data`` (one write(2) unless the system splits it) or nothing: on an error the file is cut back to where it ended
    before and OSError is raised. What was handed to write(2) survives the death of the process."""
    start = os.fstat(fd).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, start)
        raise

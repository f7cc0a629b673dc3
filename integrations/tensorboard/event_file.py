"""One event file: TFRecord framing, a name that sorts by age, unbuffered appends. Imports neither TensorFlow nor torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from trainvet.integrations.append import append, open_append
from trainvet.integrations.tensorboard.crc32c import masked

MARK = "tfevents"
LONGEST_RECORD = 256 << 20
_counter = itertools.count()


def frame(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, data, their checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked(length)), data, struct.pack("<I", masked(data))))


class EventFile:
    """A new event file in ``directory``, which must exist. Every method may raise OSError; the file then ends with a whole record."""

    def __init__(self, directory: Path) -> None:
        host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:64] or "host"
        self.path = directory / f"events.out.{MARK}.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_counter):04d}"
        self._fd = open_append(self.path, new=True)

    def write(self, event: bytes) -> int:
        """Append one serialised Event; the number of bytes it took."""
        record = frame(event)
        append(self._fd, record)
        return len(record)

    def sync(self) -> None:
        """Have the system write to the device what it holds (needed against a power loss, not against a killed process)."""
        os.fsync(self._fd)

    def close(self, delete: bool = False) -> None:
        """Close, and with ``delete`` remove, the file; never raises."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        if delete:
            with contextlib.suppress(OSError):
                self.path.unlink()


class DamagedError(ValueError):
    """A record that is not what its checksums say."""


def records(path: Path, limit: int = LONGEST_RECORD) -> Iterator[bytes]:
    """The records of an event file, checksums verified. A last record that was cut off ends the iteration.

    Raises DamagedError where the file is broken (what follows cannot be found) or a record is longer than ``limit`` bytes, and OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(header := file.read(12)) == 12:
            (length,), (check,) = struct.unpack("<Q", header[:8]), struct.unpack("<I", header[8:])
            if check != masked(header[:8]):
                raise DamagedError(f"{path.name}: broken at byte {file.tell() - 12}")
            if length > limit:
                raise DamagedError(f"{path.name}: a record of {length} bytes at byte {file.tell() - 12} is over the limit of {limit}")
            if file.tell() + length + 4 > size:
                return
            data, check_data = file.read(length), file.read(4)
            if len(data) < length or len(check_data) < 4:
                return
            if struct.unpack("<I", check_data)[0] != masked(data):
                raise DamagedError(f"{path.name}: broken at byte {file.tell() - length - 16}")
            yield data

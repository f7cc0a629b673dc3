"""CRC-32C (Castagnoli), which TensorBoard's record format asks for, without a compiled extension.

A block of 256 bytes is looked up in one table per position and combined by XOR; blocks are chained by treating the sum so far as the
first four bytes of the next block. The packages ``crc32c`` and ``google-crc32c`` are used where they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

POLYNOMIAL = 0x82F63B78
BLOCK = 256
SLAB = 64  # blocks looked up at once: their index array (128 KiB) stays in the cache
SHORT = 48  # bytes below which a plain loop is faster
Words = np.ndarray[Any, np.dtype[np.uint32]]


@functools.cache
def _tables() -> tuple[Words, list[int], tuple[list[int], ...]]:
    """By position and byte, flattened [256 * 256]; the classic byte table; the first four positions as lists."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(POLYNOMIAL), byte >> 1).astype(np.uint32)
    table = np.empty((BLOCK, 256), dtype=np.uint32)
    table[-1] = byte
    for position in range(BLOCK - 2, -1, -1):
        following = table[position + 1]
        table[position] = byte[following & 255] ^ (following >> 8)
    return table.ravel(), byte.tolist(), tuple(table[position].tolist() for position in range(4))


def numpy_crc32c(data: bytes) -> int:
    """CRC-32C of ``data``."""
    flat, byte, (first, second, third, fourth) = _tables()
    if len(data) < SHORT:
        crc = 0xFFFFFFFF
        for value in data:
            crc = byte[(crc ^ value) & 255] ^ (crc >> 8)
        return crc ^ 0xFFFFFFFF
    count = -(-len(data) // BLOCK)
    padded = np.zeros(count * BLOCK, dtype=np.uint8)  # zeros in front change nothing while the sum is 0
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, dtype=np.uint8)
    padded[start : start + 4] ^= 255  # the initial value 0xFFFFFFFF
    rows = padded.reshape(count, BLOCK)
    offsets = np.arange(0, BLOCK * 256, 256, dtype=np.intp)
    crc = 0
    for slab in range(0, count, SLAB):
        sums = np.bitwise_xor.reduce(flat.take(rows[slab : slab + SLAB] + offsets), axis=1)
        for block in sums.tolist():
            crc = block ^ first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]
    return crc ^ 0xFFFFFFFF


@functools.cache
def _best() -> Callable[[bytes], int]:
    try:
        from crc32c import crc32c as compiled
    except ImportError:
        try:
            from google_crc32c import value as compiled
        except ImportError:
            return numpy_crc32c
    return compiled  # type: ignore[no-any-return]


def crc32c(data: bytes) -> int:
    """CRC-32C of ``data``, by the fastest way that is installed."""
    return _best()(data)


def masked(data: bytes) -> int:
    """The masked checksum of the TFRecord format."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

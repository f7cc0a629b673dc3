import random

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from trainvet.integrations.tensorboard import crc32c

# RFC 3720, B.4, and the check value of the CRC catalogue
KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "crc"), KNOWN)
def test_known_vectors(data, crc):
    assert crc32c.numpy_crc32c(data) == crc


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 47, 48, 49, 255, 256, 257, 511, 512, 513, 6_400, 16_383, 16_384, 16_385, 40_000])
def test_equals_tensorboards_own_sum_at_every_boundary(size, monkeypatch):
    data = random.Random(size).randbytes(size)
    monkeypatch.setattr(crc32c, "_best", lambda: crc32c.numpy_crc32c)
    assert crc32c.masked(data) == masked_crc32c(data)

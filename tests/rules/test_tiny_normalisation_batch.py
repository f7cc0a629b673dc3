from __future__ import annotations

import pytest

from tests.series import findings
from trainvet.finding import Severity
from trainvet.rules.tiny_normalisation_batch import TinyNormalisationBatch


def told(values, samples=None):
    table = {"module.values": {"norm": values}, "module.samples": {"norm": samples or values}}
    return [(item.step, item.severity) for item in findings(TinyNormalisationBatch(), None, table)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("1 x9", [(2, Severity.ERROR)]),
        ("1, 1, 32, 1, 1, 32", []),
        ("32, 32, 32, 1", []),
        ("2 x9", [(2, Severity.INFO)]),
        ("4 x9", [(2, Severity.INFO)]),
        ("5 x9", []),
        ("0 x9", []),
        ([float("nan")] * 9, []),
    ],
)
def test_values_per_channel(values, expected):
    assert told(values) == expected


def test_positions_make_up_for_samples():
    assert told("64 x9", "1 x9") == []


def test_words_and_coverage():
    (found,) = findings(TinyNormalisationBatch(), None, {"module.values": {"norm": "1 x4"}, "module.samples": {"norm": "1 x4"}})
    assert (found.code, found.first_step, found.subjects) == ("MO108", 0, ("norm",))
    assert "one value per channel" in found.message
    assert TinyNormalisationBatch().missing() == "no batch normalisation in training mode was seen"

from __future__ import annotations

import pytest

from tests.series import run
from trainvet.rules.other_weights_at_test import OtherWeightsAtTest


@pytest.mark.parametrize(
    ("written", "expected"), [({99: 0}, []), ({99: 1}, [(99, "MO110")]), ({99: float("nan")}, [(99, "MO110")]), ({9: 0, 99: 1}, [(99, "MO110")])]
)
def test_other_weights(written, expected):
    assert run(OtherWeightsAtTest(), {"run.other_weights": written}) == expected


def test_without_a_test_nothing_is_claimed():
    assert OtherWeightsAtTest().missing() == "a test or prediction after the training"

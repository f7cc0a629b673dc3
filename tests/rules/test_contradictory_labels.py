from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.contradictory_labels import ContradictoryLabels


def counted(pairs, contradictions):
    return {"label.pairs": {"label": pairs}, "label.contradictions": {"label": contradictions}}


@pytest.mark.parametrize(
    ("pairs", "contradictions", "expected"),
    [
        ([50, 100, 200], [0.5, 1, 2], []),
        ([50, 100, 200], [0, 1, 3], [(2, "IN110")]),
        ([1000, 1000, 1000], [10, 10, 11], [(2, "IN110")]),
        ([50, 99, 99], [50, 99, 99], []),
        ([100, 200, 400], [2, 4, 8], [(0, "IN110")]),
        ([float("nan")] * 3, [float("nan")] * 3, []),
    ],
)
def test_more_than_one_in_a_hundred_pairs(pairs, contradictions, expected):
    assert run(ContradictoryLabels(), None, counted(pairs, contradictions)) == expected


def test_it_is_information_with_the_counts():
    (found,) = findings(ContradictoryLabels(), None, counted([200, 400], [20, 40]))
    assert (found.severity, found.evidence["pairs"], found.evidence["contradictions"]) == (Severity.INFO, 200, 20)
    assert "10.0% of 200 pairs" in found.message


def test_what_is_missing():
    rule = ContradictoryLabels()
    assert rule.missing() == "0 of 100 pairs with identical inputs"

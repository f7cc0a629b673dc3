from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings
from trainvet.finding import Severity
from trainvet.rules.imbalanced_labels import ImbalancedLabels
from trainvet.statistics import Facts, Loss, Subject

TWO = Facts(losses=(Loss("loss", "binary_cross_entropy", 2, 32),), subjects=(Subject("label", "label", shape=(32,)),))


def told(top, rare, seen, facts=TWO):
    columns = {"label.top_share": {"label": [top] * 3}, "label.rarest_share": {"label": [rare] * 3}, "label.seen": {"label": seen}}
    return [(item.step, item.severity) for item in findings(ImbalancedLabels(), None, columns, facts)]


@pytest.mark.parametrize(
    ("top", "seen", "expected"),
    [
        (0.97, [500, 900, 1200], [(0, Severity.INFO), (1, Severity.WARNING)]),  # three standard errors above 95 %
        (0.96, [500, 900, 4000], [(0, Severity.INFO), (2, Severity.WARNING)]),
        (0.95, [10**6] * 3, [(0, Severity.INFO)]),
        (0.9, [10**6] * 3, []),
        (0.99, [499] * 3, []),
        (1.0, [900] * 3, []),
        (float("nan"), [900] * 3, []),
    ],
)
def test_share_of_the_most_frequent_class(top, seen, expected):
    assert told(top, 1 - top, seen) == expected


@pytest.mark.parametrize(
    "facts",
    [
        dataclasses.replace(TWO, balanced=True),
        dataclasses.replace(TWO, losses=(Loss("loss", "binary_cross_entropy", 2, 32, weighted=True),)),
        dataclasses.replace(TWO, subjects=(Subject("label", "label", shape=(32, 64, 64)),)),
    ],
)
def test_what_is_corrected_or_dense_is_information(facts):
    assert told(0.98, 0.02, [5000] * 3, facts) == [(0, Severity.INFO)]


def test_one_hot_labels_are_not_dense():
    facts = Facts(losses=(Loss("loss", "cross_entropy", 3, 32),), subjects=(Subject("label", "label", shape=(32, 3)),))
    assert told(0.98, 0.01, [5000] * 3, facts) == [(0, Severity.WARNING)]


def test_a_ratio_of_ten_is_information():
    assert told(0.55, 0.054, [900] * 3) == [(0, Severity.INFO)]
    assert told(0.55, 0.056, [900] * 3) == []
    assert ImbalancedLabels().missing() == "0 of 500 class labels"

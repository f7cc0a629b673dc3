from __future__ import annotations

import numpy as np
import pytest

from tests.series import findings, run
from trainvet.rules.unshuffled_labels import UnshuffledLabels
from trainvet.statistics import Facts

TEN = float(np.log(10))


def labels(batch, entropy=TEN, count=64):
    batch = list(np.broadcast_to(batch, (40,)))
    return {"label.batch_entropy": {"label": batch}, "label.entropy": {"label": [entropy] * 40}, "label.count": {"label": [count] * 40}}


@pytest.mark.parametrize(("share", "expected"), [(0.49, [(19, "IN105")]), (0.51, [])])
def test_the_median_of_twenty_batches(share, expected):
    assert run(UnshuffledLabels(), None, labels(share * TEN)) == expected


def test_small_batches_of_many_classes_have_little_entropy_by_themselves():
    for count, classes in ((8, 10), (4, 3), (32, 100), (1, 10)):
        assert run(UnshuffledLabels(), None, labels(0.0, float(np.log(classes)), count)) == []


def test_shuffled_batches_are_quiet_at_every_size():
    random = np.random.default_rng(0)
    for classes, count in ((2, 8), (10, 16), (10, 64), (100, 256)):
        shares = []
        for _ in range(40):
            share = np.bincount(random.integers(0, classes, count), minlength=classes) / count
            shares.append(float(-(share[share > 0] * np.log(share[share > 0])).sum()))
        assert run(UnshuffledLabels(), None, labels(shares, float(np.log(classes)), count)) == []


def test_data_sorted_by_class():
    """Batches of one class, while the classes met so far grow in number."""
    met = np.log(np.minimum(1 + np.arange(40) // 4, 10))
    table = {"label.batch_entropy": {"label": [0.0] * 40}, "label.entropy": {"label": met}, "label.count": {"label": [64.0] * 40}}
    (found,) = findings(UnshuffledLabels(), None, table)
    assert found.first_step == 4
    assert found.step == 23


def test_a_loader_that_shuffles_is_not_judged():
    assert run(UnshuffledLabels(), None, labels(0.0), Facts(shuffled=True)) == []
    assert run(UnshuffledLabels(), None, labels(0.0), Facts(shuffled=False)) == [(19, "IN105")]


def test_nan_gives_no_verdict():
    assert run(UnshuffledLabels(), None, labels(float("nan"))) == []
    assert UnshuffledLabels().missing() == "0 of 20 batches that can be compared"

from __future__ import annotations

import numpy as np
import pytest

from tests.series import drive, findings, run, snapshots
from trainvet.rules.unshuffled_labels import UnshuffledLabels
from trainvet.statistics import Facts, Loss

TEN = float(np.log(10))


def labels(batch, entropy=TEN, count=64, classes=10, top=0.1, length=40):
    table = {"batch_entropy": batch, "entropy": entropy, "count": count, "classes": classes, "top_share": top}
    return {f"label.{key}": {"label": list(np.broadcast_to(value, (length,)))} for key, value in table.items()}


EXPECTED = TEN - float(np.log(1 + 9 / 64))


@pytest.mark.parametrize(("share", "expected"), [(0.49, [(19, "IN105")]), (0.51, [])])
def test_the_mean_of_twenty_batches(share, expected):
    assert run(UnshuffledLabels(), None, labels(share * EXPECTED)) == expected


def test_few_batches_with_much_entropy_count_in_the_mean():
    """Most batches hold none of the rare classes: that alone is no order."""
    assert run(UnshuffledLabels(), None, labels([0.0, 0.0, 0.0, 2.3, 2.3, 2.3, 0.0, 2.3] * 5)) == []
    assert run(UnshuffledLabels(), None, labels(([0.0] * 9 + [2.3]) * 4)) == [(19, "IN105")]


def test_small_batches_of_many_classes_have_little_entropy_by_themselves():
    for count, classes in ((8, 10), (4, 3), (32, 100), (1, 10)):
        assert run(UnshuffledLabels(), None, labels(0.0, float(np.log(classes)), count, classes)) == []


@pytest.mark.parametrize(("entropy", "expected"), [(0.29, []), (0.31, [(19, "IN105")])])
def test_one_class_that_is_nearly_all_is_not_judged(entropy, expected):
    assert run(UnshuffledLabels(), None, labels(0.0, entropy, 64, 2, 0.9)) == expected


def entropy(counts):
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def counted(drawn, classes):
    """The table of a run over batches of labels int64 [B, n]."""
    batches = np.stack([np.bincount(batch, minlength=classes) for batch in drawn])
    total = batches.cumsum(0)
    met = [int((row > 0).sum()) for row in total]
    top = [float(row.max() / row.sum()) for row in total]
    return labels([entropy(row) for row in batches], [entropy(row) for row in total], drawn.shape[1], met, top, len(drawn))


SHARES = {
    "balanced": lambda classes: np.full(classes, 1 / classes),
    "90/10": lambda classes: np.array([0.9] + [0.1 / (classes - 1)] * (classes - 1)),
    "97/3": lambda classes: np.array([0.97] + [0.03 / (classes - 1)] * (classes - 1)),
    "Zipf": lambda classes: (1 / np.arange(1, classes + 1)) / (1 / np.arange(1, classes + 1)).sum(),
}


@pytest.mark.parametrize("shape", SHARES)
def test_shuffled_batches_are_quiet_whatever_the_classes_and_the_batch(shape):
    random = np.random.default_rng(0)
    for classes in (2, 3, 5, 10, 30, 100):
        for count in (4, 8, 15, 16, 32, 64, 256):
            drawn = random.choice(classes, size=(120, count), p=SHARES[shape](classes))
            assert drive(UnshuffledLabels(), snapshots(columns=counted(drawn, classes))) == [], (classes, count)


@pytest.mark.parametrize(("classes", "count"), [(2, 16), (2, 64), (3, 32), (10, 32), (10, 64), (100, 256)])
def test_labels_in_order_are_found_and_shuffled_ones_are_not(classes, count):
    """Sorted by class, three epochs of 100 batches."""
    random = np.random.default_rng(1)
    drawn = np.sort(random.integers(0, classes, 100 * count))
    order = np.concatenate([drawn] * 3).reshape(300, count)
    assert [code for _, code in run(UnshuffledLabels(), None, counted(order, classes))] == ["IN105"]


def test_ninety_ten_in_order():
    drawn = np.concatenate([np.zeros(90 * 64, dtype=int), np.ones(10 * 64, dtype=int)])
    order = np.concatenate([drawn] * 3).reshape(300, 64)
    assert len(run(UnshuffledLabels(), None, counted(order, 2))) == 1


def test_a_loss_that_weights_classes_counts_another_entropy():
    """97 % of one class, weighted until both are worth the same: ln 2 counted, 0.13 in a batch; and ten even classes in order."""
    facts = Facts(losses=(Loss("loss", "cross_entropy", 2, 64, weighted=True),))
    rare = labels(0.13, float(np.log(2)), 64, 2, 0.97)
    assert run(UnshuffledLabels(), None, rare) == [(19, "IN105")]
    assert run(UnshuffledLabels(), None, rare, facts) == []
    assert run(UnshuffledLabels(), None, labels(0.0, count=256), facts) == [(19, "IN105")]


def test_data_sorted_by_class():
    """Batches of one class, while the classes met so far grow in number."""
    met = np.minimum(1 + np.arange(40) // 4, 10)
    (found,) = findings(UnshuffledLabels(), None, labels(0.0, np.log(met), 64, met, 1 / met))
    assert found.first_step == 4
    assert found.step == 23


def test_a_loader_that_shuffles_is_not_judged():
    assert run(UnshuffledLabels(), None, labels(0.0), Facts(shuffled=True)) == []
    assert run(UnshuffledLabels(), None, labels(0.0), Facts(shuffled=False)) == [(19, "IN105")]


def test_nan_gives_no_verdict():
    assert run(UnshuffledLabels(), None, labels(float("nan"))) == []
    assert UnshuffledLabels().missing() == "0 of 20 batches that can be compared"

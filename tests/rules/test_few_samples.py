from __future__ import annotations

import pytest

from trainvet.finding import Severity
from trainvet.rules.few_samples import FewSamples
from trainvet.statistics import Facts, Loss

TEN = (Loss("loss", "cross_entropy", 10, 32),)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (Facts(samples_per_epoch=99, batches_per_epoch=20, losses=TEN), 1),
        (Facts(samples_per_epoch=100, batches_per_epoch=20, losses=TEN), 0),
        (Facts(samples_per_epoch=99, batches_per_epoch=20), 0),
        (Facts(samples_per_epoch=5000, batches_per_epoch=9, losses=TEN), 1),
        (Facts(samples_per_epoch=5000, batches_per_epoch=10, losses=TEN), 0),
        (Facts(samples_per_epoch=9, batches_per_epoch=1, losses=TEN, repeats_batches=True), 0),
        (Facts(losses=TEN), 0),
    ],
)
def test_margins_and_exemptions(facts, found):
    told = list(FewSamples().begin(facts))
    assert [(item.code, item.severity) for item in told] == [("IN112", Severity.INFO)] * found


def test_told_once_even_if_the_classes_become_known_later():
    rule = FewSamples()
    assert list(rule.begin(Facts(samples_per_epoch=50, batches_per_epoch=20))) == []
    assert len(list(rule.begin(Facts(samples_per_epoch=50, batches_per_epoch=20, losses=TEN)))) == 1
    assert list(rule.begin(Facts(samples_per_epoch=50, batches_per_epoch=20, losses=TEN))) == []
    assert FewSamples().missing() == "the length of an epoch"

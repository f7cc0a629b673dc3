from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.rules.repeated_batch import RepeatedBatch
from trainvet.statistics import Facts


def batches(written, **more):
    return {"input.fingerprint": {"input": written, **more}}


def test_fires_on_the_sixth_equal_batch_once():
    (found,) = findings(RepeatedBatch(), None, batches("3, 7 x20"), Facts(batches_per_epoch=9))
    assert (found.code, found.step, found.first_step, found.subjects) == ("IN107", 6, 2, ("input",))


@pytest.mark.parametrize("written", ["7 x5, 8", "1, 2, 1, 2, 1, 2, 1, 2, 1, 2", "1, 1, 1, 2, 2, 2, 3, 3, 3"])
def test_quiet(written):
    assert run(RepeatedBatch(), None, batches(written)) == []


def test_all_inputs_must_be_equal():
    assert run(RepeatedBatch(), None, batches("7 x12", other="1..12 x12")) == []


def test_told_again_after_other_batches():
    assert run(RepeatedBatch(), None, batches("7 x9, 1, 7 x9")) == [(5, "IN107"), (15, "IN107")]


@pytest.mark.parametrize("facts", [Facts(repeats_batches=True), Facts(batches_per_epoch=1)])
def test_batches_that_are_meant_to_repeat(facts):
    assert run(RepeatedBatch(), None, batches("7 x20"), facts) == []


@pytest.mark.parametrize(("interval", "epoch"), [(50, 50), (50, 25), (10, 10), (6, 3), (8, 16)])
def test_an_order_that_stays_the_same_is_no_repetition(interval, epoch):
    at = [step for step in range(interval * 20) if step < 10 or step % interval == 0]
    seen = [100.0 + step % epoch for step in at]
    for known in (Facts(), Facts(batches_per_epoch=epoch), Facts(batches_per_epoch=epoch, shuffled=False)):
        assert run(RepeatedBatch(), None, batches(seen), known, at=at) == []


def test_a_repetition_between_distant_samples():
    at = range(0, 500, 50)
    assert run(RepeatedBatch(), None, batches([7] * 10), Facts(shuffled=True), at=at) == [(250, "IN107")]
    assert run(RepeatedBatch(), None, batches([7] * 10), Facts(), at=at) == []
    assert run(RepeatedBatch(), None, batches([7] * 10), Facts(), at=[0, 1, *at[1:9]]) == [(200, "IN107")]


def test_nan_is_no_batch_twice():
    assert run(RepeatedBatch(), None, batches([float("nan")] * 20)) == []

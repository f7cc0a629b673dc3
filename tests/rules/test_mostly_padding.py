from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.mostly_padding import MostlyPadding


def padding(written):
    return {"input.padding_share": {"tokens": written}}


@pytest.mark.parametrize(("share", "expected"), [(0.5, []), (0.51, [(19, "IN108")])])
def test_the_mean_of_twenty_batches(share, expected):
    assert run(MostlyPadding(), None, padding([share] * 40)) == expected
    assert run(MostlyPadding(), None, padding([share] * 19)) == []


def test_a_few_short_batches_are_nothing():
    assert run(MostlyPadding(), None, padding("0.9 x5, 0.2 x35")) == []


def test_it_is_information():
    (found,) = findings(MostlyPadding(), None, padding("0.8 x20"))
    assert (found.severity, found.subjects) == (Severity.INFO, ("tokens",))
    assert "80% of the tokens" in found.message


def test_nan_gives_no_verdict_and_what_is_missing():
    assert run(MostlyPadding(), None, padding([float("nan")] * 30)) == []
    assert MostlyPadding().missing() == "0 of 20 sampled batches"

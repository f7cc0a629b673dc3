from __future__ import annotations

import pytest

from tests.series import well_worded
from trainvet.finding import Severity
from trainvet.rules.unexpectedly_shared import UnexpectedlyShared
from trainvet.statistics import Facts, Subject


@pytest.mark.parametrize(
    ("facts", "severity", "subjects"),
    [
        (Facts(broken_ties=("head.weight = words.weight",)), Severity.ERROR, ("head.weight",)),
        (Facts(shared_modules=("layers.0 = layers.1",)), Severity.WARNING, ("layers.0",)),
        (Facts(subjects=(Subject("words.weight", "parameter", tied_to="head.weight"),)), Severity.INFO, ("words.weight",)),
    ],
)
def test_each_kind_of_sharing_is_told_once(facts, severity, subjects):
    rule = UnexpectedlyShared()
    (found,) = rule.begin(facts)
    assert (found.code, found.severity, found.subjects) == ("MO102", severity, subjects)
    well_worded(found)
    assert list(rule.begin(facts)) == []
    again = UnexpectedlyShared()
    again.load_state_dict(rule.state_dict())
    assert list(again.begin(facts)) == []


def test_nothing_shared():
    rule = UnexpectedlyShared()
    assert rule.missing() == "the model"
    assert list(rule.begin(Facts(subjects=(Subject("a.weight", "parameter"),)))) == []
    assert rule.missing() == ""

from __future__ import annotations

import json

import pytest

from tests.series import well_worded
from trainvet.finding import Severity
from trainvet.rules.irreproducible_run import IrreproducibleRun
from trainvet.statistics import Facts


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        (Facts(seeded=False), 1),
        (Facts(seeded=False, deterministic=False), 1),
        (Facts(seeded=True), 0),
        (Facts(seeded=True, deterministic=False), 0),
        (Facts(), 0),
        (Facts(deterministic=False), 0),
    ],
)
def test_a_seed(facts, count):
    found = list(IrreproducibleRun().begin(facts))
    assert [item.code for item in found] == ["RN101"] * count
    assert all(item.severity == Severity.INFO for item in found)
    for item in found:
        well_worded(item)


def test_what_is_said():
    (found,) = IrreproducibleRun().begin(Facts("keras", seeded=False, deterministic=False))
    assert "deterministic" in found.message
    assert found.fixes[0] == "call keras.utils.set_random_seed(0) first"
    (found,) = IrreproducibleRun().begin(Facts("torch", seeded=False))
    assert "seed_everything" in found.fixes[0]


def test_told_once_and_missing_evidence_is_said():
    rule, other = IrreproducibleRun(), IrreproducibleRun()
    assert list(rule.begin(Facts())) == []
    assert rule.missing() == "whether a seed was set is not known"
    assert len(list(rule.begin(Facts(seeded=False)))) == 1
    assert rule.missing() == ""
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert list(other.begin(Facts(seeded=False))) == []

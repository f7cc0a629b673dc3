"""The benchmark of the rules' cost shows every rule what it reads."""

from __future__ import annotations

import pytest

from benchmarks.rules.__main__ import cost, facts, snapshots
from trainvet.rule import catalogue


@pytest.mark.parametrize("kind", [pytest.param(kind, id=code) for code, kind in catalogue().items()])
def test_every_rule_can_be_measured(kind):
    plan = facts(30)
    held = next(iter(snapshots(kind(), plan, 1)))
    assert kind.reads <= set(held.keys())
    assert 0 <= cost(kind, plan, 3)[0] <= cost(kind, plan, 3)[1] + 1

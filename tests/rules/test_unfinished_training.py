from __future__ import annotations

import json

import numpy as np
import pytest

from tests.noise import KINDS, falling, noise
from tests.series import drive, plain, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.unfinished_training import UnfinishedTraining
from trainvet.statistics import Facts


def told(values, planned=None, step=None, block=40):
    rule = UnfinishedTraining()
    run = snapshots({"loss.value": values}, block=block)
    assert drive(rule, run, Facts(planned_steps=planned)) == []
    other = UnfinishedTraining()
    list(other.begin(Facts(planned_steps=planned)))
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    end = run[-1].step if step is None else step
    found = list(rule.end(end))
    assert plain(other.end(end)) == plain(found)
    for item in found:
        well_worded(item)
    return found


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("3..1 x600", 1),
        ("3..2 x400, 2..1.51 x200", 0),  # 0.5 in the middle third
        ("3..2 x400, 2..1.48 x200", 1),
        ("3..1 x400, 1 x200", 0),
        ("1..3 x600", 0),
        ("3..1 x110", 0),
        ("3..1 x120", 1),
        ("3 x600", 0),
        ("nan x600", 0),
    ],
)
def test_thirds(written, count):
    assert len(told(written)) == count


def test_not_judged_where_the_run_was_stopped():
    assert told("3..1 x600", planned=700) == []
    assert len(told("3..1 x600", planned=600)) == 1


def test_it_is_information_with_a_length():
    (found,) = told("3..1 x600", planned=600)
    assert found.severity == Severity.INFO
    assert found.fixes[0] == "train longer: 1200 steps"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_has_settled_is_quiet(kind):
    told_of = [told(falling(kind, 4000, seed, pace=0.15), block=400) for seed in range(8)]
    assert sum(map(len, told_of)) <= 1
    assert len(told(np.linspace(3, 1, 4000) + 0.1 * noise(kind, 4000, 0), block=400)) <= 1


@pytest.mark.parametrize("block", [1, 7, 600, 3000])
def test_any_block_gives_the_same_findings(block):
    assert plain(told(np.linspace(3, 1, 3000), block=block)) == plain(told(np.linspace(3, 1, 3000), block=100))


def test_missing_evidence_is_said():
    rule = UnfinishedTraining()
    assert rule.missing() == "0 of 120 applied steps"
    drive(rule, snapshots({"loss.value": "1 x120"}))
    assert rule.missing() == ""

from __future__ import annotations

import json
import math

import pytest

from tests.series import drive, plain, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.underfitting import Underfitting
from trainvet.statistics import Facts, Loss

WARN, INFO = Severity.WARNING, Severity.INFO
LN10 = math.log(10)
CLASSES = {"label.entropy": {"label": [LN10] * 5}, "label.seen": {"label": [2000.0] * 5}}
# five batches of 300 targets with mean 2 and mean square 5: variance 1
VALUES = {"label.mean": {"label": [2.0] * 5}, "label.mean_square": {"label": [5.0] * 5}, "label.count": {"label": [300.0] * 5}}


def plan(kind="cross_entropy", **more):
    return Facts(losses=(Loss("loss", kind, 10, 64, **more),))


def told(written, columns=CLASSES, facts=None):
    rule, other = Underfitting(), Underfitting()
    facts = facts or plan()
    run = snapshots({"loss.value": written}, columns)
    assert drive(rule, run, facts) == []
    found = list(rule.end(run[-1].step))
    list(other.begin(facts))
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert plain(other.end(run[-1].step)) == plain(found)
    for item in found:
        well_worded(item)
    return [item.severity for item in found]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("2.3 x500", [WARN]),
        ("2.3 x499", [INFO]),
        ("2.26 x500", [WARN]),  # 0.98 ln 10 = 2.2565
        ("2.25 x500", [INFO]),
        ("2.08 x500", [INFO]),  # 0.9 ln 10 = 2.072
        ("2.06 x500", []),
        ("2.3 x300, 1 x200", []),  # the last 200 count
        ("1 x300, 2.3 x200", [WARN]),
        ("2.3 x199", []),
        ("nan x500", []),
    ],
)
def test_cross_entropy(written, expected):
    assert told(written) == expected


@pytest.mark.parametrize(("written", "expected"), [("1 x500", [WARN]), ("0.97 x500", [INFO]), ("0.89 x500", []), ("1 x400", [INFO])])
def test_squared_error(written, expected):
    assert told(written, VALUES, plan("regression")) == expected


QUIET = {
    "weighted": (CLASSES, plan(weighted=True)),
    "smoothed": (CLASSES, plan(smoothed=True)),
    "summed": (CLASSES, plan(reduction="sum")),
    "composed": (CLASSES, plan("unknown")),
    "no facts": (CLASSES, Facts()),
    "few labels": (CLASSES | {"label.seen": {"label": [999.0] * 5}}, plan()),
    "few targets": (VALUES | {"label.count": {"label": [199.0] * 5}}, plan("regression")),
    "constant targets": (VALUES | {"label.mean_square": {"label": [4.0] * 5}}, plan("regression")),
    "nan": (VALUES | {"label.mean": {"label": [float("nan")] * 5}}, plan("regression")),
    "no labels": (None, plan()),
}


@pytest.mark.parametrize(("columns", "facts"), QUIET.values(), ids=QUIET)
def test_quiet(columns, facts):
    assert told("5 x500", columns, facts) == []


def test_missing_evidence_is_said():
    rule = Underfitting()
    assert rule.missing() == "0 of 200 applied steps"
    drive(rule, snapshots({"loss.value": "5 x300"}), plan())
    assert rule.missing() == "0 labels of 1000 (20 per class)"
    drive(rule, snapshots({"loss.value": "5 x300"}, CLASSES), plan())
    assert rule.missing() == ""
    list(rule.begin(plan(weighted=True)))
    assert rule.missing() == "not judged: a smoothed, weighted or summed loss"

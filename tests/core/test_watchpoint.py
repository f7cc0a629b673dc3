from __future__ import annotations

import pytest

from tests.series import drive, snapshots
from trainvet import Watchpoint
from trainvet.finding import Severity
from trainvet.monitor import Monitor
from trainvet.selection import choose


def told(watchpoint, tracks=None, columns=None, at=None):
    return [(item.step, item.subjects) for item in drive(watchpoint, snapshots(tracks, columns, at))]


def norm(**written):
    return {"gradient.abs_max": {name.replace("_", "."): value for name, value in written.items()}}


def test_above_on_sampled_steps():
    assert told(Watchpoint("gradient.abs_max", above=10), None, norm(a="1, 10, 10.1, 10.2, 1, 11")) == [(2, ("a",)), (5, ("a",))]


def test_below_and_both_sides():
    assert told(Watchpoint("gradient.abs_max", below=1), None, norm(a="1, 0.9")) == [(1, ("a",))]
    both = norm(a="5, 0.9, 5, 10.1")
    assert told(Watchpoint("gradient.abs_max", below=1, above=10), None, both) == [(1, ("a",)), (3, ("a",))]
    assert told(Watchpoint("gradient.abs_max", outside=(1, 10)), None, both) == [(1, ("a",)), (3, ("a",))]


def test_patience_in_a_row():
    watch = Watchpoint("gradient.abs_max", above=10, patience=3)
    (finding,) = drive(watch, snapshots(None, norm(a="11, 11, 1, 11, 11, 11, 11")))
    assert (finding.step, finding.first_step) == (5, 3)


def test_a_series_is_judged_at_every_row_whatever_the_blocks():
    for block in (1, 4, 50):
        found = drive(Watchpoint("loss.value", above=2, patience=2), snapshots({"loss.value": "1 x5, 3 x3, 1, 3 x2"}, block=block))
        assert [item.step for item in found] == [6, 10]


def test_only_the_places_that_match():
    columns = norm(encoder_0_weight="99", encoder_1_weight="99", head_weight="99")
    assert told(Watchpoint("gradient.abs_max", above=10, where="encoder.*"), None, columns) == [(0, ("encoder.0.weight", "encoder.1.weight"))]
    assert told(Watchpoint("gradient.abs_max", above=10, where="head"), None, columns) == [(0, ("head.weight",))]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_is_beyond_every_limit(value):
    watch = Watchpoint("gradient.abs_max", outside=(-1e30, 1e30))
    assert told(watch, None, norm(a=value)) == [(0, ("a",))]


def test_it_also_sees_what_follows_a_nan():
    monitor = Monitor(choose(rules=[Watchpoint("gradient.abs_max", above=10, name="big", severity="error")]))
    for snapshot in snapshots({"loss.value": "1, nan, nan"}, norm(a="1, 1, 50")):
        monitor.observe(snapshot)
    assert ("WP100", "big", Severity.ERROR) in [
        (item.code, item.name, item.severity) for item in monitor.report.findings[0].consequences + monitor.report.findings
    ]


def test_state_in_the_middle_of_a_streak():
    first, second = (Watchpoint("gradient.abs_max", above=10, patience=4) for _ in range(2))
    run = snapshots(None, norm(a="11 x6"))
    assert drive(first, run[:3]) == []
    second.load_state_dict(first.state_dict())
    assert [item.step for item in drive(second, run[3:])] == [3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistic": "gradient.abs_mix", "above": 1}, "did you mean gradient.abs_max"),
        ({"statistic": "nothing.like.it", "above": 1}, "one of trainvet.statistics.MEANING"),
        ({"statistic": "gradient.norm"}, "needs a limit"),
        ({"statistic": "gradient.norm", "outside": (3, 3)}, "low < high"),
        ({"statistic": "gradient.norm", "below": 5, "above": 2}, "low < high"),
        ({"statistic": "gradient.norm", "above": float("nan")}, "finite"),
        ({"statistic": "gradient.norm", "outside": (1, 2), "above": 3}, "not both"),
        ({"statistic": "gradient.norm", "above": 1, "patience": 0}, "whole number of at least 1"),
        ({"statistic": "gradient.norm", "above": 1, "patience": 1.5}, "whole number of at least 1"),
        ({"statistic": "gradient.norm", "above": 1, "severity": "bad"}, "unknown severity"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Watchpoint(**arguments)

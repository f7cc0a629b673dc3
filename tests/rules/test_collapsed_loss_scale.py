from __future__ import annotations

import pytest

from tests.series import drive, findings, run, series, snapshots
from trainvet.finding import Severity
from trainvet.rules.collapsed_loss_scale import CollapsedLossScale


def scaler(skipped, start=65536.0, growth=2000, backoff=0.5):
    """A dynamic loss scale over the written flags: halved after a skipped step, doubled after ``growth`` applied ones in a row."""
    flags, scale, clean, scales = list(series(skipped).values()), start, 0, []
    for flag in flags:
        scales.append(scale)
        clean = 0 if flag else clean + 1
        scale = scale * backoff if flag else scale * 2 if clean == growth else scale
        clean = 0 if clean == growth else clean
    return {"run.skipped": flags, "run.loss_scale": scales}


def told(tracks, rule=None):
    return [(item.step, item.severity) for item in findings(rule or CollapsedLossScale(), tracks)]


def often(skips, between):
    """``skips`` skipped steps with ``between`` applied ones before each."""
    return ", ".join(f"0 x{between}, 1" for _ in range(skips)) + ", 0 x3"


FIRES = [
    (scaler("1 x10"), 9),  # the earliest possible step
    (scaler("0 x30, 1 x10"), 39),
    (scaler(often(10, 30)), 310),  # ten halvings with applied steps between: seen with the tenth lower scale
    (scaler(often(4, 30), start=8.0), 124),  # below 1
    (scaler("1 x8, 0 x19, 1, 0 x19, 1, 0 x3", start=2.0**24), 48),  # never 20 applied in a row before the ten
    ({"run.skipped": "0 x20", "run.loss_scale": "8 x10, 0.95 x10"}, 10),
    ({"run.skipped": "0 x20", "run.loss_scale": "8 x10, nan x10"}, 10),
    ({"run.skipped": "0 x20, 1 x12", "run.loss_scale": "8 x32"}, 29),  # a scale that is at its floor, or fixed
]
QUIET = [
    scaler("1 x9, 0 x300"),
    scaler("0 x30, 1 x9, 0 x30, 1 x9", start=2.0**30, growth=20),
    scaler("1 x8, 0 x300", start=2.0**24),  # calibration
    scaler("1 x8, 0 x20, 1, 0 x30, 1, 0 x30", start=2.0**24),  # calibration, and two more later
    scaler(often(9, 30)),
    scaler(often(3, 30), start=8.0),  # down to 1, not below
    *(scaler(often(20, growth + 1), growth=growth) for growth in (1, 10, 20)),  # one skip after every growth
    {"run.skipped": "0 x300", "run.loss_scale": "0.5 x300"},  # chosen so
    scaler("0 x40, 1, 0 x40", start=0.5),
    {"run.skipped": "1 x30"},  # the guard drops updates, and there is no scaler
    {"run.loss_scale": "4..1 x30"},
    {"run.skipped": "1 x9, 0 x30, 1 x5", "run.loss_scale": "8 x44"},
]


@pytest.mark.parametrize(("tracks", "step"), FIRES)
def test_fires(tracks, step):
    assert run(CollapsedLossScale(), tracks) == [(step, "LS102")]


@pytest.mark.parametrize("tracks", QUIET)
def test_quiet(tracks):
    assert run(CollapsedLossScale(), tracks) == []


def test_one_skip_after_every_growth_is_how_the_scale_is_found():
    assert drive(CollapsedLossScale(), snapshots(scaler(often(15, 2001)), block=50)) == []


def test_the_twentieth_skip_in_a_row_is_fatal():
    assert told(scaler("1 x19")) == [(9, Severity.ERROR)]
    assert told(scaler("1 x60")) == [(9, Severity.ERROR), (19, Severity.FATAL)]


def test_a_scale_without_a_floor_falls_to_nothing_in_one_finding():
    falling = scaler("0 x5, 1 x9, 0, 1 x9, 0, 1 x9, 0", start=64.0)
    assert told(falling) == [(12, Severity.ERROR)]


def test_told_again_only_after_it_was_clear():
    assert [step for step, _ in told(scaler("1 x12, 0 x30, 1 x12", start=2.0**30))] == [9]
    assert [step for step, _ in told(scaler("1 x12, 0 x30, 1 x12", start=2.0**40, growth=20))] == [9, 51]


def test_an_episode_lasts_through_calm_blocks_while_the_scale_has_not_grown():
    assert [step for step, _ in told(scaler("1 x12, 0 x90, 1, 0 x30, 1, 0 x9", start=2.0**30))] == [9]


def test_what_is_said_where_steps_were_applied_before():
    (found,) = findings(CollapsedLossScale(), scaler("0 x30, 1 x12, 0 x3"))
    assert (found.step, found.first_step, found.where) == (39, 30, "loss scale")
    assert found.message == "the loss scale is down to 128 (from 65536) and 10 steps in a row were skipped: the weights stand still"
    assert found.evidence == {"loss scale": 128.0, "skipped in a row": 10, "lowered": 9}
    assert found.fixes[-1] == "start the scaler at 65536, where a step was applied last"


def test_what_is_said_of_a_slow_collapse():
    (found,) = findings(CollapsedLossScale(), scaler(often(10, 30)))
    assert found.first_step == 31
    assert found.message.endswith("down to 64 (from 65536) and it was lowered 10 times without one growth: more and more steps are skipped")


def test_no_scale_is_recommended_where_no_step_was_applied():
    (found,) = findings(CollapsedLossScale(), scaler("1 x10"))
    assert found.fixes == CollapsedLossScale.fixes


def test_the_numbers_are_settings():
    assert run(CollapsedLossScale(skips=5), scaler("1 x5")) == [(4, "LS102")]
    assert run(CollapsedLossScale(halvings=5), scaler(often(5, 30))) == [(155, "LS102")]
    assert run(CollapsedLossScale(lowest=100.0), scaler(often(4, 30), start=1000.0)) == [(124, "LS102")]
    assert [severity for _, severity in told(scaler("1 x12"), CollapsedLossScale(fatal=12))] == [Severity.ERROR, Severity.FATAL]

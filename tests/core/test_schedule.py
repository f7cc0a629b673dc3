from __future__ import annotations

import itertools

import pytest

from trainvet.schedule import Schedule


def sampled(schedule, steps, start=0):
    """The steps at which samples are taken when every due one is."""
    found = []
    for step in range(start, start + steps):
        if schedule.due(step):
            schedule.sampled(step)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("planned", "interval"), [(1, 1), (59, 1), (60, 1), (119, 1), (120, 2), (600, 10), (3000, 50), (3_000_000, 50), (None, 16), (0, 16)]
)
def test_the_interval_follows_the_length_of_the_run(planned, interval):
    schedule = Schedule()
    schedule.begin(planned)
    assert schedule.interval == interval


def test_dense_at_the_start_then_every_n():
    schedule = Schedule(every=7)
    schedule.begin(None)
    assert sampled(schedule, 40) == [*range(10), 16, 23, 30, 37]


def test_a_short_run_is_sampled_at_every_step():
    schedule = Schedule()
    schedule.begin(60)
    assert sampled(schedule, 60) == list(range(60))


def test_an_unknown_length_is_taken_for_twice_as_long_when_it_is_passed():
    schedule = Schedule()
    schedule.begin(None)
    steps = sampled(schedule, 5000)
    gaps = [after - before for before, after in itertools.pairwise(steps[10:])]
    assert gaps[0] == 16
    assert gaps == sorted(gaps), "the interval only grows"
    assert gaps[-1] == 50


def test_late_news_of_an_earlier_sample_change_nothing():
    schedule = Schedule(every=5)
    schedule.begin(None)
    schedule.sampled(20)
    schedule.sampled(12)
    assert [schedule.due(step) for step in (21, 24, 25)] == [False, False, True]


def test_asking_does_not_count_as_sampling():
    schedule = Schedule(every=5)
    schedule.begin(None)
    schedule.sampled(9)
    assert [schedule.due(step) for step in (10, 13, 14, 15, 20)] == [False, False, True, True, True]
    assert schedule.due(14)


def test_dense_again_where_a_run_resumes():
    schedule = Schedule(every=10)
    schedule.begin(None, step=1000)
    assert sampled(schedule, 40, start=1000) == [*range(1000, 1010), 1019, 1029, 1039]


def test_slowing_down_doubles():
    schedule = Schedule(every=10)
    schedule.slow_down()
    schedule.slow_down()
    assert schedule.interval == 40


def test_state():
    schedule, other = Schedule(), Schedule()
    schedule.begin(None)
    sampled(schedule, 2500)
    schedule.slow_down()
    other.begin(None)
    other.load_state_dict(schedule.state_dict())
    assert other.interval == schedule.interval == 100


@pytest.mark.parametrize("every", [0, -1, 1.5, "often", True, None])
def test_an_impossible_interval_is_refused(every):
    with pytest.raises(ValueError, match=r'must be "auto" or a whole number'):
        Schedule(every)

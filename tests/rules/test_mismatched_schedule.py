from __future__ import annotations

import numpy as np
import pytest

from tests.series import findings, run
from trainvet.rules.mismatched_schedule import MismatchedSchedule
from trainvet.statistics import Facts, Schedule

STEPS = 1000
PER_EPOCH = 100


def cosine(length, floor=0.0, steps=STEPS):
    return floor + (1 - floor) * (1 + np.cos(np.pi * np.arange(steps) / length)) / 2


def one_cycle(length, steps=STEPS):
    at = np.arange(steps)
    up = 0.04 + 0.96 * (1 - np.cos(np.pi * at / (0.3 * length))) / 2
    down = (1 + np.cos(np.pi * np.clip((at - 0.3 * length) / (0.7 * length), 0, 1))) / 2
    return np.where(at < 0.3 * length, up, np.maximum(down, 4e-6))


def warm(curve, steps):
    return np.minimum(1, np.arange(len(curve)) / steps) * curve


def epochs(curve, per_epoch=PER_EPOCH):
    """The same schedule stepped once per epoch."""
    return curve[np.arange(len(curve)) // per_epoch]


def facts(kind, curve, horizon=None, interval="step", *, restarts=False, reactive=False, group="group 0", resumed=False):
    schedule = Schedule(group, kind, interval, 0.1 * np.asarray(curve), horizon, restarts, reactive)
    return Facts(planned_steps=STEPS, schedules=(schedule,), resumed=resumed)


FLAT = np.ones(STEPS)
STEPPED = 0.1 ** (np.arange(STEPS) // 30)

FIRES = [
    facts("CosineAnnealingLR", cosine(1000 / 0.49), 1000 / 0.49),
    facts("CosineAnnealingLR", cosine(1000 / 1.51), 1000 / 1.51),
    facts("OneCycleLR", epochs(one_cycle(STEPS)), STEPS * PER_EPOCH, "epoch"),  # made for steps, stepped per epoch
    facts("CosineAnnealingLR", epochs(cosine(STEPS)), STEPS * PER_EPOCH, "epoch"),
    facts("CosineAnnealingLR", cosine(10), 10.0),  # made for epochs, stepped per step
    facts("CosineAnnealingLR", cosine(10, 0.5), 10.0),
    facts("CosineDecay", np.maximum(cosine(10), 0) * (np.arange(STEPS) < 10), 10.0),
    facts("PolynomialDecay", np.maximum(1 - np.arange(STEPS) / 300, 0.1), 300.0),  # rests at a tenth
    facts("StepLR", STEPPED),  # 30 epochs, stepped per step
    facts("LambdaLR", warm(0.96 ** np.arange(STEPS), 50)),  # from zero, up, and gone
    facts("StepLR", FLAT, None, "epoch"),
    facts("PiecewiseConstantDecay", FLAT, 30_000.0),
]
QUIET = [
    facts("CosineAnnealingLR", cosine(1000 / 0.51), 1000 / 0.51),
    facts("CosineAnnealingLR", cosine(1000 / 1.49), 1000 / 1.49),
    facts("CosineAnnealingLR", cosine(STEPS), 1000.0),
    facts("CosineAnnealingLR", epochs(cosine(STEPS)), 1000.0, "epoch"),
    facts("OneCycleLR", one_cycle(STEPS), 1000.0),
    facts("OneCycleLR", one_cycle(999), 999.0),
    facts("SequentialLR", warm(cosine(STEPS), 100), 1000.0),
    facts("SequentialLR", warm(FLAT, 100)),
    facts("MultiStepLR", 0.1 ** np.searchsorted([400, 700], np.arange(STEPS), side="right")),
    facts("PiecewiseConstantDecay", 0.1 ** np.searchsorted([200, 400, 450], np.arange(STEPS)), 450.0),  # its last step down is no end
    facts("StepLR", 0.1 ** (np.arange(STEPS) // 300)),
    facts("ExponentialLR", epochs(0.95 ** (np.arange(STEPS) / PER_EPOCH)), None, "epoch"),
    facts("ConstantLR", FLAT),
    facts("LambdaLR", FLAT),
    facts("LambdaLR", 1 / np.sqrt(1 + np.arange(STEPS))),
    facts("CosineAnnealingWarmRestarts", cosine(10), restarts=True),
    facts("CyclicLR", np.abs(np.sin(np.arange(STEPS))), 20.0, restarts=True),
    facts("ReduceLROnPlateau", np.zeros(0), None, "epoch", reactive=True),
    facts("ReduceLROnPlateau", 1e-9 + STEPPED, None, "epoch", reactive=True),
    facts("LinearLR", np.maximum(1 - np.arange(STEPS) / 400, 0.2), 320.0),  # ends early at a fifth, and stays there
    facts("LinearLR", np.maximum(1 - np.arange(STEPS) / 400, 0.101), 360.0),
    facts("LambdaLR", np.where(np.arange(STEPS) < 500, 1, 9e-5)),
    facts("LambdaLR", np.where(np.arange(STEPS) < 400, 1, 1.1e-4)),
    facts("LambdaLR", np.where(np.arange(STEPS) % 500 < 100, 1, 0)),  # comes back
    facts("LambdaLR", np.zeros(STEPS)),  # the rates themselves are LR101's
    facts("LambdaLR", np.full(STEPS, np.nan)),
    facts("CosineAnnealingLR", [1.0], 100.0),  # a run of one step
    facts("CosineAnnealingLR", cosine(2500)[:100], 2500.0, resumed=True),  # the rest of a run
    Facts(planned_steps=None),
]


@pytest.mark.parametrize("known", FIRES, ids=lambda known: known.schedules[0].type)
def test_fires(known):
    assert run(MismatchedSchedule(), facts=known) == [(0, "LR102")]


@pytest.mark.parametrize("known", QUIET, ids=lambda known: "".join(item.type for item in known.schedules))
def test_quiet(known):
    assert run(MismatchedSchedule(), facts=known) == []


def test_the_margin_of_half_a_run_with_a_rate():
    assert run(MismatchedSchedule(), facts=facts("LambdaLR", np.where(np.arange(STEPS) < 499, 1, 9e-5))) == [(0, "LR102")]


def test_a_schedule_is_told_once():
    rule, known = MismatchedSchedule(), FIRES[0]
    assert len(list(rule.begin(known))) == 1
    assert list(rule.begin(known)) == []
    healthy = MismatchedSchedule()
    assert list(healthy.begin(QUIET[2])) == []
    assert list(healthy.begin(facts("CosineAnnealingLR", cosine(10), 10.0))) == [], "judged when it was first seen"
    other = MismatchedSchedule()
    other.load_state_dict(rule.state_dict())
    assert list(other.begin(known)) == []
    assert len(list(other.begin(facts("CosineAnnealingLR", cosine(10), 10.0, group="group 1")))) == 1


def test_groups_with_one_fault_share_a_finding():
    schedules = tuple(Schedule(f"group {index}", "StepLR", "step", rate * STEPPED) for index, rate in enumerate((0.1, 0.01)))
    (found,) = findings(MismatchedSchedule(), facts=Facts(schedules=schedules))
    assert found.subjects == ("group 0", "group 1")
    assert found.where == "learning-rate schedule StepLR of group 0, group 1"


def test_what_is_said_of_steps_counted_and_epochs_stepped():
    (found,) = findings(MismatchedSchedule(), facts=FIRES[2])
    assert found.message == "the run ends after 1000 optimizer steps, 0.01 of the 100000 that OneCycleLR is made for"
    assert found.fixes[0] == "step the schedule after every optimizer step: it is stepped after every epoch now"
    assert found.fixes[1] == "or make it 1000 optimizer steps long (now 100000)"
    assert (found.evidence["schedule's length"], found.evidence["optimizer steps"]) == (100_000.0, 1000)
    assert found.evidence["peak"] == FIRES[2].schedules[0].curve.max() > found.evidence["first rate"]


def test_what_is_said_of_epochs_counted_and_steps_stepped():
    (found,) = findings(MismatchedSchedule(), facts=FIRES[4])
    assert found.message == "the schedule CosineAnnealingLR is through after 10 of 1000 optimizer steps"
    assert found.fixes[0] == "step the schedule after every epoch: it is stepped after every step now"
    (found,) = findings(MismatchedSchedule(), facts=facts("StepLR", STEPPED))
    assert found.message == "the schedule StepLR has taken the learning rate below 0.0001 of its peak after 150 of 1000 optimizer steps"
    assert found.fixes[:2] == ("step the schedule after every epoch: it is stepped after every step now", "or make it 1000 optimizer steps long")


def test_where_the_interval_is_right_only_the_length_is_wrong():
    assert findings(MismatchedSchedule(), facts=FIRES[0])[0].fixes[0] == "make it 1000 optimizer steps long (now 2041)"


def test_the_numbers_are_settings():
    assert run(MismatchedSchedule(least=0.52), facts=QUIET[0]) == [(0, "LR102")]
    assert run(MismatchedSchedule(most=1.48), facts=QUIET[1]) == [(0, "LR102")]
    assert run(MismatchedSchedule(vanished=1e-3), facts=facts("LambdaLR", np.where(np.arange(STEPS) < 400, 1, 9e-4))) == [(0, "LR102")]
    assert run(MismatchedSchedule(floor=0.3), facts=facts("LinearLR", np.maximum(1 - np.arange(STEPS) / 400, 0.2), 320.0)) == [(0, "LR102")]

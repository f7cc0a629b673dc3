from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.rules.test_oversized_first_update import PLAN, SHAPES, columns
from tests.series import findings, plan, run
from trainvet.rules.undersized_update import UndersizedUpdate
from trainvet.statistics import Optimizer, Schedule

AT = tuple(range(0, 12 * 50, 50))
RATE = {"optimizer.learning_rate": "0.01 x600"}


def all_at(ratio):
    return dict.fromkeys(SHAPES, ratio)


def fires(ratios, rate=RATE, facts=PLAN, **more):
    return run(UndersizedUpdate(), rate, columns(ratios, **more), facts, AT)


@pytest.mark.parametrize(("ratio", "told"), [(1.1e-5, []), (0.9e-5, [(250, "WT106")]), (9e-5, []), (1e-9, [(250, "WT106")])])
def test_the_limit_and_the_fifth_sample(ratio, told):
    """Steps 0 to 9 do not count, so the first sample is step 50."""
    assert fires(all_at(ratio)) == told


def test_the_sample_before_is_quiet():
    assert fires(all_at([1e-6] * 5)) == []


def test_five_samples_in_a_row():
    assert fires(all_at([1e-3, 1e-6, 1e-6, 1e-6, 1e-6, 1e-3] * 2)) == []


def test_told_once_until_it_was_clear():
    assert len(fires(all_at([1e-6] * 6 + [1.5e-5] + [1e-6] * 5))) == 1
    assert [step for step, _ in fires(all_at([1e-6] * 6 + [3e-5] + [1e-6] * 5))] == [250, 550]


@pytest.mark.parametrize(("end", "told"), [("0.0051", 1), ("0.0049", 0)])
def test_a_rate_below_half_its_peak_explains_small_updates(end, told):
    ratios = all_at([1e-3] + [1e-6] * 11)
    assert len(fires(ratios, {"optimizer.learning_rate": f"0.01 x10, {end} x590"})) == told


def test_while_the_rate_rises_updates_may_be_small():
    """A warm-up over 2,000 steps stays below 1e-5 for long."""
    assert fires(all_at(1e-6), {"optimizer.learning_rate": "0..0.01 x600"}) == []
    assert fires(all_at(1e-6), {"optimizer.learning_rate": "0.001..0.01 x200, 0.01 x400"}) == [(450, "WT106")]


def test_a_warm_up_by_epochs_is_far_from_its_planned_peak():
    stairs = {"optimizer.learning_rate": "0.001 x300, 0.002 x300"}
    assert fires(all_at(1e-6), stairs) == [(250, "WT106")]
    curve = np.repeat(np.linspace(0.001, 0.01, 10), 300)
    planned = dataclasses.replace(PLAN, schedules=(Schedule("group 0", "LambdaLR", "epoch", curve),))
    assert fires(all_at(1e-6), stairs, planned) == []


def test_an_unknown_or_zero_rate_gives_no_verdict():
    assert fires(all_at(1e-6), None) == []
    assert fires(all_at(1e-6), {"optimizer.learning_rate": "0 x600"}) == []
    assert UndersizedUpdate().missing() == "0 of 5 samples with a settled learning rate after step 10"


def test_matrices_without_a_gradient_do_not_count():
    """Idle experts, and the other optimizer's matrices under manual optimisation."""
    idle = {"a.weight": 0.0, "b.weight": 0.0, "c.weight": 0.0, "d.weight": 1e-3, "d.bias": 1e-3}
    gradient = {"gradient.rms": {name: [0.0 if ratio == 0 else 1.0] * 12 for name, ratio in idle.items()}}
    assert run(UndersizedUpdate(), RATE, columns(idle) | gradient, PLAN, AT) == []
    assert len(run(UndersizedUpdate(), RATE, columns(idle), PLAN, AT)) == 1


def test_copies_without_an_optimizer_do_not_count():
    moving = dataclasses.replace(PLAN, optimizers=(dataclasses.replace(PLAN.optimizers[0], parameters=("d.weight", "d.bias")),))
    assert fires({"a.weight": 0.0, "b.weight": 0.0, "c.weight": 0.0, "d.weight": 1e-3, "d.bias": 1e-3}, RATE, moving) == []


def test_few_matrices_are_exempt_only_beside_as_many_frozen_ones():
    shapes = {"head.weight": (8, 8), "body.weight": (8, 8)}
    both = {"head.weight": 1e-6, "body.weight": 1e-6}
    head = {"head.weight": 1e-6}
    assert len(fires(both, RATE, plan(shapes))) == 1
    assert fires(head, RATE, plan(shapes, {"trainable": {"body.weight": False}})) == []


def test_tiny_weights_do_not_count():
    assert fires(all_at(1e-6), before=0.0009) == []
    assert len(fires(all_at(1e-6), before=0.0011)) == 1


def test_nan_gives_no_verdict():
    assert fires(all_at(float("nan"))) == []


def test_the_fix_carries_the_runs_numbers():
    found = findings(UndersizedUpdate(), {"optimizer.learning_rate": "1e-7 x600"}, columns(all_at(5e-7)), PLAN, AT)[0]
    assert found.fixes[0] == "set the learning rate to about 0.002 (now 1e-07)"
    assert found.first_step == 50
    assert found.subjects == ("a.weight", "b.weight", "c.weight", "d.weight")


SGD = plan(SHAPES, optimizer=Optimizer("optimizer 0", "SGD", "sgd", groups=("group 0",)))


@pytest.mark.parametrize(
    ("facts", "rate", "ratio", "advice"),
    [
        (PLAN, 1e-7, 1e-9, "set the learning rate to about 0.01 (now 1e-07)"),  # no higher, whatever the ratio
        (PLAN, 1e-7, 0.0, "set the learning rate to about 0.01 (now 1e-07)"),
        (PLAN, 0.004, 1e-9, "set the learning rate to about 0.01 (now 0.004)"),
        (PLAN, 0.006, 1e-9, "check that every part receives a gradient"),  # the rate is not what is wrong
        (SGD, 1e-4, 3e-6, "set the learning rate to about 0.1 (now 0.0001)"),
        (SGD, 1e-4, 1e-9, "set the learning rate to about 1 (now 0.0001)"),
        (SGD, 1.0, 1e-9, "check that every part receives a gradient"),
    ],
)
def test_the_advice_stays_among_rates_that_can_train(facts, rate, ratio, advice):
    table = columns(all_at(ratio))
    (found,) = findings(UndersizedUpdate(), {"optimizer.learning_rate": f"{rate} x600"}, table, facts, AT)
    assert found.fixes[0] == advice

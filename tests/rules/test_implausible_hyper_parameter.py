from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, well_worded
from trainvet.finding import Severity
from trainvet.rules.implausible_hyper_parameter import ImplausibleHyperParameter
from trainvet.statistics import Facts, Optimizer

SGD = Optimizer("SGD", "SGD", "sgd", momentum=0.9, groups=("group 0",))
ADAM = Optimizer("AdamW", "AdamW", "adam", 1e-8, groups=("group 0",), betas=(0.9, 0.999))
W, INFO = Severity.WARNING, Severity.INFO


def told(optimizer, rate="1e-3 x9", **facts):
    plan = Facts(optimizers=(optimizer,), **facts)
    return [(item.step, item.severity) for item in findings(ImplausibleHyperParameter(), {"optimizer.learning_rate": rate}, None, plan)]


def adam(**changes):
    return dataclasses.replace(ADAM, **changes)


def sgd(**changes):
    return dataclasses.replace(SGD, **changes)


FIRES = {
    "SGD 0.5 with momentum 0.999": (sgd(momentum=0.999), "0.5 x9", (0, W)),
    "SGD 0.011 with momentum 0.99": (sgd(momentum=0.99), "0.011 x9", (0, W)),
    "from the step on that is too high": (sgd(momentum=0.99), "0.005 x5, 0.02 x9", (5, W)),
    "momentum 1": (sgd(momentum=1.0), "1e-3 x9", (0, W)),
    "momentum below 0": (sgd(momentum=-0.9), "1e-3 x9", (0, W)),
    "beta 1": (adam(betas=(0.9, 1.0)), "1e-3 x9", (0, W)),
    "beta below 0": (adam(betas=(-0.1, 0.9)), "1e-3 x9", (0, W)),
    "betas swapped": (adam(betas=(0.999, 0.9)), "1e-3 x9", (0, INFO)),
    "epsilon 0": (adam(epsilon=0.0), "1e-3 x9", (0, W)),
    "epsilon 1e-3": (adam(epsilon=1e-3), "1e-3 x9", (0, INFO)),
    "AdamW decays 1.1 % a step": (adam(weight_decay=11.0), "1e-3 x9", (0, W)),
    "SGD decays 1.1 % a step": (sgd(weight_decay=0.011, coupled_decay=True), "0.1 x9", (0, W)),
    "decay below 0": (adam(weight_decay=-0.1), "1e-3 x9", (0, W)),
}
QUIET = {
    "SGD 0.1 with momentum 0.9": (sgd(), "0.1 x9"),
    "SGD 1 with momentum 0.9": (sgd(), "1 x9"),
    "SGD 0.01 with momentum 0.99": (sgd(momentum=0.99), "0.01 x9"),
    "SGD 1e-3 with momentum 0.999": (sgd(momentum=0.999), "1e-3 x9"),
    "AdamW": (adam(weight_decay=0.1), "1e-2 x9"),
    "a GAN's betas": (adam(betas=(0.0, 0.9)), "1e-4 x9"),
    "short averages": (adam(betas=(0.9, 0.9)), "1e-4 x9"),
    "epsilon 1e-15": (adam(epsilon=1e-15), "1e-3 x9"),
    "epsilon 9e-4": (adam(epsilon=9e-4), "1e-3 x9"),
    "Adafactor has no epsilon": (adam(type="Adafactor", epsilon=0.0, betas=()), "1e-3 x9"),
    "Muon has no epsilon": (adam(type="Muon", family="other", epsilon=0.0, betas=()), "1e-3 x9"),
    "AdamW decays 0.99 % a step": (adam(weight_decay=9.9), "1e-3 x9"),
    "L2 in Adam is not a share of the weights": (adam(type="Adam", weight_decay=11.0, coupled_decay=True), "1e-3 x9"),
    "SGD 5e-4": (sgd(weight_decay=5e-4, coupled_decay=True), "0.1 x9"),
    "NaN gives no verdict": (sgd(momentum=0.999), [float("nan")] * 9),
}


@pytest.mark.parametrize(("optimizer", "rate", "expected"), FIRES.values(), ids=FIRES)
def test_fires_once(optimizer, rate, expected):
    assert told(optimizer, rate) == [expected]


@pytest.mark.parametrize(("optimizer", "rate"), QUIET.values(), ids=QUIET)
def test_quiet(optimizer, rate):
    assert told(optimizer, rate) == []


def test_clipping_at_zero():
    assert told(ADAM, clipping=0.0) == [(0, W)]
    assert told(ADAM, clipping=0.1) == []
    assert told(ADAM, clipping=None) == []


def test_fixes_carry_the_numbers():
    (found,) = findings(ImplausibleHyperParameter(), {"optimizer.learning_rate": "0.5 x9"}, None, Facts(optimizers=(sgd(momentum=0.999),)))
    assert found.fixes == ("set momentum=0.9, or the learning rate to about 0.0001 (now 0.5)",)
    assert found.message == "momentum 0.999 makes the learning rate 0.5 act like 500"
    (found,) = findings(ImplausibleHyperParameter(), {"optimizer.learning_rate": "1e-2 x9"}, None, Facts(optimizers=(adam(weight_decay=10.0),)))
    assert found.fixes == ("set weight_decay=0.01 (now 10)",)
    (found,) = findings(ImplausibleHyperParameter(), {"optimizer.learning_rate": "1e-3 x9"}, None, Facts(optimizers=(adam(betas=(0.999, 0.9)),)))
    assert found.fixes == ("set betas=(0.9, 0.999)",)


def test_a_changed_plan_is_told_once_and_coverage_says_what_is_missing():
    rule = ImplausibleHyperParameter()
    assert rule.missing() == "no optimizer is known"
    assert list(rule.begin(Facts(optimizers=(ADAM,)))) == []
    assert rule.missing() == ""
    bad = Facts(optimizers=(adam(epsilon=0.0),))
    (found,) = rule.begin(bad)
    well_worded(found)
    assert list(rule.begin(bad)) == []

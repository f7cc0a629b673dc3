from __future__ import annotations

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.saturated_clipping import SaturatedClipping
from trainvet.statistics import Facts, Optimizer

WARN, INFO = Severity.WARNING, Severity.INFO
SGD = Facts(optimizers=(Optimizer("SGD", "SGD", "sgd"),), clipping=0.01)


def told(scale, facts=SGD, norm="5 x900"):
    found = findings(SaturatedClipping(), {"run.clip_scale": scale, "run.gradient_norm": norm}, facts=facts)
    return [(item.step, item.severity) for item in found]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0.09 x200", [(199, INFO)]),
        ("0.11 x200", []),
        ("0.009 x200", [(199, WARN)]),
        ("0.011 x200", [(199, INFO)]),
        ("0.009 x199", []),
        ("1 x19, 0.009 x181", [(199, WARN)]),  # 90.5 % clipped
        ("1 x20, 0.009 x180", []),
        ("1 x200, 0.009 x200", [(399, WARN)]),
        ("0.09 x200, 0.009 x400", [(199, INFO), (399, WARN)]),
        ("0.009 x600", [(199, WARN)]),
        ("0.009 x200, 1 x200, 0.009 x200", [(199, WARN), (599, WARN)]),
        ("nan x400", []),
    ],
)
def test_stretches_of_200_steps(written, expected):
    assert told(written) == expected


def test_the_advice_is_the_usual_norm():
    (found,) = findings(SaturatedClipping(), {"run.clip_scale": "0.002 x200", "run.gradient_norm": "5 x200"}, facts=SGD)
    assert found.fixes == ("set the clipping threshold to about 5, the usual norm (now 0.01)",)
    assert found.message == "100% of 200 steps were clipped, to 0.002 of their gradient in the median"
    (found,) = findings(SaturatedClipping(), {"run.clip_scale": "0.002 x200"}, facts=SGD)
    assert found.fixes == SaturatedClipping.fixes


@pytest.mark.parametrize(("norm", "severity"), [(1.0, INFO), (3.9e-5, WARN), (4.1e-5, INFO)])
def test_with_adam_only_where_its_epsilon_is_near(norm, severity):
    """16 elements: a clipped norm of 4e-7 leaves each at 1e-7, ten times epsilon."""
    adam = plan({"a.weight": (4, 4)})
    assert told("0.00999 x200", adam, [norm * 0.01 / 0.00999] * 200) == [(199, severity)]


def test_with_adam_and_an_unknown_norm_it_is_information():
    found = drive(SaturatedClipping(), snapshots({"run.clip_scale": "0.001 x200"}), plan({"a.weight": (4, 4)}))
    assert [item.severity for item in found] == [INFO]


def test_where_not_every_step_is_measured_20_samples_do():
    sparse = dict.fromkeys(range(0, 400, 20), 0.001)
    facts = Facts(every_step=False, optimizers=SGD.optimizers)
    found = findings(SaturatedClipping(), {"run.clip_scale": {"run": sparse}}, facts=facts)
    assert [(item.first_step, item.step) for item in found] == [(0, 380)]


def test_missing_evidence_is_said():
    rule = SaturatedClipping()
    assert rule.missing() == "0 of 200 steps with clipping"
    drive(rule, snapshots({"run.clip_scale": "1 x200"}))
    assert rule.missing() == ""

from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, run
from trainvet.rules.unscaled_target import UnscaledTarget
from trainvet.statistics import Facts, Loss

SQUARED = Facts(losses=(Loss("loss", "regression", samples=32),))


def data(mean, std, output, length=5):
    return {
        "label.mean": {"label": [mean] * length},
        "label.std": {"label": [std] * length},
        "output.abs_mean": {"output": [output] * length},
        "output.std": {"output": [output] * length},
    }


@pytest.mark.parametrize(
    ("mean", "std", "output", "found"),
    [
        (2e5, 7e4, 0.3, 1),
        (0, 99, 0.3, 0),
        (0, 101, 0.3, 1),
        (22, 9, 0.3, 0),
        (0, 101, 5.0, 0),
        (0, 1, 1e-6, 0),  # a head that starts near zero
        (0, 1, 0.0, 0),
        (0, 2.9e-3, 0.3, 1),
        (0, 3.1e-3, 0.3, 0),
        (0, 0, 0.3, 0),
        (float("nan"), float("nan"), 0.3, 0),
    ],
)
def test_a_factor_of_a_hundred(mean, std, output, found):
    assert run(UnscaledTarget(), None, data(mean, std, output), SQUARED) == [(1, "IN109")] * found


def test_the_fix_names_the_numbers():
    (found,) = findings(UnscaledTarget(), None, data(2e5, 7e4, 0.3), SQUARED)
    assert found.fixes[0] == "standardise the targets: subtract 2e+05 and divide by 7e+04, and undo it on the predictions"
    assert (found.first_step, found.subjects) == (0, ("label",))


def test_later_outputs_do_not_count():
    table = data(0, 200, 0.3)
    table["output.std"] = table["output.abs_mean"] = {"output": [0.3, 150, 150, 150, 150]}
    assert run(UnscaledTarget(), None, table, SQUARED) == [(1, "IN109")]
    table["output.std"] = table["output.abs_mean"] = {"output": [3, 0.1, 0.1, 0.1, 0.1]}
    assert run(UnscaledTarget(), None, table, SQUARED) == []


@pytest.mark.parametrize(
    "facts", [Facts(), Facts(losses=(Loss("loss", "cross_entropy", 10),)), Facts(losses=(Loss("loss"),)), dataclasses.replace(SQUARED, resumed=True)]
)
def test_other_losses_and_resumed_runs_are_not_judged(facts):
    assert run(UnscaledTarget(), None, data(2e5, 7e4, 0.3), facts) == []


def test_what_is_missing():
    rule = UnscaledTarget()
    assert rule.missing() == "a sampled batch of a regression"
    list(rule.begin(Facts(losses=(Loss("loss", "cross_entropy", 10),))))
    assert rule.missing() == "no squared error is minimised"

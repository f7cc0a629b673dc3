from __future__ import annotations

import numpy as np
import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.implausible_learning_rate import ImplausibleLearningRate
from trainvet.statistics import Facts, Optimizer, Schedule

ADAM = Optimizer("optimizer 0", "AdamW", "adam", 1e-8, groups=("group 0", "group 1"))
SGD = Optimizer("optimizer 0", "SGD", "sgd", momentum=0.9, groups=("group 0", "group 1"))
PLAIN = Optimizer("optimizer 0", "SGD", "sgd", groups=("group 0",))
OTHER = Optimizer("optimizer 0", "Muon", "other", groups=("group 0",))
AT = np.arange(300)
COSINE = 1e-3 * (1 + np.cos(np.pi * AT / 300)) / 2


def facts(optimizer=ADAM, curve=(), planned=None, kind="LambdaLR"):
    schedules = (Schedule("group 0", kind, "step", np.asarray(curve, dtype=float)),) if len(curve) else ()
    return Facts(optimizers=(optimizer,) if optimizer else (), schedules=schedules, planned_steps=planned)


def rate(written, **more):
    return {"optimizer.learning_rate": written, **more}


def one_cycle(peak):
    up = peak / 25 + (peak - peak / 25) * (1 - np.cos(np.pi * AT[:90] / 90)) / 2
    return np.concatenate([up, peak * (1 + np.cos(np.pi * np.arange(209) / 209)) / 2, [peak / 2.5e5]])


STAIRS = np.repeat([1e-9, 5e-4, 1e-3, 5e-4], 50)

QUIET = {
    "warm-up from 0": ("0..1e-3 x100, 1e-3 x100", facts()),
    "warm-up from 1e-8 by a schedule": (STAIRS, facts(curve=STAIRS)),
    "a factor on the first step only": ("1e-9, 1e-6..1e-3 x200", facts()),
    "cosine to 0": ([*COSINE, *[0] * 30], facts()),
    "linear to 0, late": ("1e-3 x180, 0 x20", facts(planned=200)),
    "to 0 where the schedule says so": ("1e-3 x50, 0 x50", facts(curve=[1e-3] * 50 + [0.0] * 50)),
    "smooth decay": ("1e-3..5e-5 x20, 0 x50", facts()),
    "one-cycle": (one_cycle(1e-2), facts()),
    "warm restarts": ([*COSINE, *COSINE, *(0.5 * COSINE)], facts()),
    "warm restarts, half a per cent higher": ("1e-3..1e-6 x50, 1.005e-3 x50", facts()),
    "plateau": ("1e-3 x50, 1e-4 x50, 1e-5 x50, 1e-6 x50", facts()),
    "a fall to nothing": ("1e-3 x50, 1e-12 x50", facts()),
    "ninefold": ("1e-3 x50, 9.9e-3 x50", facts()),
    "tenfold in two steps": ("1e-3 x50, 3e-3, 1e-2 x50", facts()),
    "Adam at 1e-2": ("1e-2 x50", facts()),
    "Adam at 1e-7": ("1e-7 x50", facts()),
    "Adam, slowly up from nothing": ("1e-10..1e-8 x200", facts()),
    "Adam, planned to rise": ("1e-9 x50", facts(curve=[1e-9] * 60 + [1e-3] * 60)),
    "SGD 0.1 with momentum 0.9": ("0.1 x50", facts(SGD)),
    "SGD 1": ("1 x50", facts(PLAIN)),
    "SGD 1e-9": ("1e-9 x50", facts(PLAIN)),
    "an optimizer that is not known": ("7 x50", facts(OTHER)),
    "no facts": ("7 x50", facts(None)),
    "nine steps at 0": ("1e-3 x50, 0 x9, 1e-3 x50", facts()),
    "steps at 0 that were not applied": (rate("0 x40", **{"run.skipped": "0 x9, 1 x31"}), facts()),
}
FIRES = {
    "NaN": ("1e-3 x50, nan x5", facts(), 50, Severity.ERROR),
    "infinite": ("1e-3 x5, inf x50", facts(), 5, Severity.ERROR),
    "negative": ("-1e-3 x50", facts(), 0, Severity.ERROR),
    "0 from the start": ("0 x50", facts(), 9, Severity.ERROR),
    "0 from the start, planned to rise": ("0 x50", facts(curve=[0.0] * 60 + [1e-3] * 60), 9, Severity.WARNING),
    "0 after a tenth": ("1e-3..1e-4 x50, 0 x50", facts(planned=1000), 59, Severity.ERROR),
    "0 after more than a twentieth": ("1e-3..5.1e-5 x20, 0 x50", facts(), 29, Severity.ERROR),
    "0 early": ("1e-3 x170, 0 x20", facts(planned=200), 179, Severity.ERROR),
    "0 where the schedule says otherwise": ("1e-3 x50, 0 x50", facts(curve=[1e-3] * 100), 59, Severity.ERROR),
    "0 where the schedule is 0 at its start only": ("0 x50", facts(curve=[0.0] * 50), 9, Severity.ERROR),
    "elevenfold": ("1e-4 x50, 1.1e-3 x50", facts(), 50, Severity.WARNING),
    "on the third step": ("1e-4 x2, 5e-3 x50", facts(), 2, Severity.WARNING),
    "above the plan": ("1e-5 x50, 5e-3 x50", facts(curve=[1e-5] * 50 + [1e-3] * 50), 50, Severity.WARNING),
    "above the peak": ("1e-3..1e-6 x50, 1.02e-3 x50", facts(), 50, Severity.WARNING),
    "Adam above 1e-2": ("1.01e-2 x50", facts(), 0, Severity.INFO),
    "Adam, up to above 1e-2": ("0..2e-2 x201", facts(), 101, Severity.INFO),
    "Adam below 1e-7": ("0.99e-7 x50", facts(), 9, Severity.INFO),
    "SGD 0.11 with momentum 0.9": ("0.11 x50", facts(SGD), 0, Severity.INFO),
    "SGD 1.01": ("1.01 x50", facts(PLAIN), 0, Severity.INFO),
}


@pytest.mark.parametrize("name", QUIET)
def test_quiet(name):
    written, known = QUIET[name]
    assert run(ImplausibleLearningRate(), written if isinstance(written, dict) else rate(written), facts=known) == []


@pytest.mark.parametrize("name", FIRES)
def test_fires_once(name):
    written, known, step, severity = FIRES[name]
    assert [(item.step, item.severity) for item in findings(ImplausibleLearningRate(), rate(written), facts=known)] == [(step, severity)]


@pytest.mark.parametrize("frozen", ["group 0", "group 1"])
def test_a_group_frozen_at_0_beside_others_is_information(frozen):
    written = {name: "0 x50" if name == frozen else "1e-3 x50" for name in ("group 0", "group 1")}
    (found,) = findings(ImplausibleLearningRate(), rate(written), facts=facts())
    assert (found.severity, found.step, found.subjects) == (Severity.INFO, 9, (frozen,))
    late = {name: "0 x50" if name == frozen else "0 x12, 1e-3 x38" for name in ("group 0", "group 1")}
    assert [item.severity for item in findings(ImplausibleLearningRate(), rate(late), facts=facts())] == [Severity.ERROR] * 2


def test_a_group_that_was_set_to_0_beside_others_is_an_error():
    written = {"group 0": "1e-3 x20, 0 x50", "group 1": "1e-3 x70"}
    assert [(item.severity, item.step) for item in findings(ImplausibleLearningRate(), rate(written), facts=facts())] == [(Severity.ERROR, 29)]


def test_a_group_that_joins_later_is_new():
    written = {"group 0": "1e-5 x100", "group 1": "_ x50, 1e-3 x50"}
    assert run(ImplausibleLearningRate(), rate(written), facts=facts()) == []
    thawed = {"group 0": "1e-5 x100", "group 1": "0 x9, 1e-3 x91"}
    assert run(ImplausibleLearningRate(), rate(thawed), facts=facts()) == []


def test_zeros_are_counted_in_applied_steps():
    tracks = rate("1e-3 x5, 0 x40", **{"run.skipped": "0 x10, 1 x20, 0 x15"})
    assert run(ImplausibleLearningRate(), tracks) == [(34, "LR101")]


def test_told_again_only_after_it_was_clear():
    assert [step for step, _ in run(ImplausibleLearningRate(), rate("1e-3 x5, nan x3, 1e-3, nan x3"))] == [5, 9]
    assert [step for step, _ in run(ImplausibleLearningRate(), rate("1e-3 x5, nan x3, 1e-3 x50, nan x3"))] == [5, 58]
    assert [step for step, _ in run(ImplausibleLearningRate(), rate("1e-3 x5, 0 x30, 1e-3, 0 x30"))] == [14, 45]
    assert [step for step, _ in run(ImplausibleLearningRate(), rate("2e-2 x50, 1e-3 x50, 2e-2 x50"), facts=facts())] == [0]


def test_what_is_said():
    (leap,) = findings(ImplausibleLearningRate(), rate("1e-4 x50, 5e-3 x50"), facts=facts(curve=[1e-4] * 100, kind="StepLR"))
    assert leap.message == "the learning rate leaps from 0.0001 to 0.005 in one step"
    assert leap.fixes == ("keep the rate at 0.0001, or raise it over many steps", "look at what StepLR gives at this step")
    assert leap.evidence == {"learning rate": 0.005, "rate before": 0.0001}
    (idle,) = findings(ImplausibleLearningRate(), rate("1e-3 x5, 0 x30"))
    assert (idle.message, idle.first_step, idle.evidence["rate before"]) == ("the learning rate has been 0 for 10 applied steps", 5, 1e-3)
    assert idle.where == "learning rate of group 0"
    (odd,) = findings(ImplausibleLearningRate(), rate("0.5 x50"), facts=facts(SGD))
    assert (odd.message, odd.fixes[0]) == ("a learning rate of 0.5 is unusual for SGD", "try 0.01")
    (odd,) = findings(ImplausibleLearningRate(), rate("0.5 x50"), facts=facts())
    assert (odd.message, odd.fixes[0]) == ("a learning rate of 0.5 is unusual for AdamW", "try 1e-3")


def test_the_numbers_are_settings():
    assert run(ImplausibleLearningRate(zeros=5), rate("0 x5")) == [(4, "LR101")]
    assert run(ImplausibleLearningRate(jump=3.0), rate("1e-3 x5, 4e-3 x5")) == [(5, "LR101")]
    assert run(ImplausibleLearningRate(adam_high=1e-3), rate("2e-3 x5"), facts=facts()) == [(0, "LR101")]
    assert run(ImplausibleLearningRate(adam_low=1e-6), rate("2e-7 x20"), facts=facts()) == [(9, "LR101")]
    assert run(ImplausibleLearningRate(sgd_high=10.0), rate("0.5 x5"), facts=facts(SGD)) == []

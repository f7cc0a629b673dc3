from __future__ import annotations

import pytest

from tests.rules.test_oversized_first_update import PLAN, SHAPES, TWO, columns
from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.oversized_update import OversizedUpdate

AT = tuple(range(20, 20 + 12 * 50, 50))


def all_at(ratio):
    return dict.fromkeys(SHAPES, ratio)


@pytest.mark.parametrize(("ratio", "severity"), [(0.069, None), (0.071, Severity.WARNING), (0.9, Severity.WARNING), (1.1, Severity.ERROR)])
def test_limits_of_the_median(ratio, severity):
    found = findings(OversizedUpdate(), None, columns(all_at(ratio)), PLAN, AT)
    assert [(item.step, item.first_step, item.severity) for item in found] == ([(120, 20, severity)] if severity else [])


@pytest.mark.parametrize(("ratio", "severity"), [(0.49, None), (0.51, Severity.WARNING), (1.1, Severity.ERROR)])
def test_limits_of_one_matrix(ratio, severity):
    found = findings(OversizedUpdate(), None, columns(all_at(0.01) | {"c.weight": ratio}), PLAN, AT)
    assert [(item.step, item.subjects, item.severity) for item in found] == ([(120, ("c.weight",), severity)] if severity else [])


@pytest.mark.parametrize(("ratio", "severity"), [(0.99, None), (1.01, Severity.ERROR)])
def test_the_limit_with_few_matrices(ratio, severity):
    found = findings(OversizedUpdate(), None, columns({"a.weight": ratio, "b.weight": 0.01}), TWO, AT)
    assert [item.severity for item in found] == ([severity] if severity else [])


def test_three_samples_in_a_row():
    twice = [0.5, 0.5, 0.01] * 4
    assert run(OversizedUpdate(), None, columns(all_at(twice)), PLAN, AT) == []
    assert run(OversizedUpdate(), None, columns(all_at([0.5] * 2)), PLAN, AT) == []


def test_different_matrices_in_turn_are_no_streak():
    turns = {name: [0.9 if index % 4 == turn else 0.01 for index in range(12)] for turn, name in enumerate(SHAPES)}
    assert run(OversizedUpdate(), None, columns(turns), PLAN, AT) == []


def test_the_first_twenty_applied_steps_do_not_count():
    early = [0.5] * 20 + [0.01] * 10
    assert run(OversizedUpdate(), None, columns(all_at(early)), PLAN) == []
    assert run(OversizedUpdate(), None, columns(all_at([0.5] * 22)), PLAN) == []
    assert run(OversizedUpdate(), None, columns(all_at([0.5] * 23)), PLAN) == [(22, "WT105")]


def test_told_once_until_it_was_clear():
    wobble = [0.1, 0.1, 0.1, 0.06, 0.1, 0.1, 0.1, 0.06, 0.1, 0.1, 0.1]
    assert len(run(OversizedUpdate(), None, columns(all_at(wobble)), PLAN, AT)) == 1
    clear = [0.1, 0.1, 0.1, 0.01, 0.1, 0.1, 0.1]
    assert [step for step, _ in run(OversizedUpdate(), None, columns(all_at(clear)), PLAN, AT)] == [120, 320]


def test_a_warning_may_grow_into_one_error():
    found = findings(OversizedUpdate(), None, columns(all_at([0.1] * 4 + [2.0] * 8)), PLAN, AT)
    assert [(item.step, item.severity) for item in found] == [(120, Severity.WARNING), (320, Severity.ERROR)]


def test_tiny_weights_do_not_count():
    """Zero-initialised branches, LoRA's B, gates: any step is large compared with them."""
    assert run(OversizedUpdate(), None, columns(all_at(3.0), before=0.0009), PLAN, AT) == []
    assert len(run(OversizedUpdate(), None, columns(all_at(3.0), before=0.0011), PLAN, AT)) == 1


def test_nan_gives_no_verdict():
    assert run(OversizedUpdate(), None, columns(all_at(float("nan"))), PLAN, AT) == []


def test_the_fix_carries_the_runs_numbers():
    found = findings(OversizedUpdate(), {"optimizer.learning_rate": "0.1 x600"}, columns(all_at(0.2)), PLAN, AT)[0]
    assert found.fixes[0] == "set the learning rate to about 0.002 (now 0.1)"
    assert found.evidence["matrices"] == 4


def test_coverage():
    rule = OversizedUpdate()
    assert rule.missing() == "0 of 3 samples after step 20"

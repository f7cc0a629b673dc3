from __future__ import annotations

import dataclasses

import pytest

from tests.series import drive, findings, plan, snapshots
from trainvet.finding import Severity
from trainvet.rules.collapsing_weight import CollapsingWeight
from trainvet.statistics import Layer, Optimizer

SHAPES = {f"{layer}.weight": (8, 8) for layer in "abc"} | {"c.bias": (8,)}
PLAN = plan(SHAPES)
DECAY = Optimizer("AdamW", "AdamW", "adam", 1e-8, weight_decay=5.0, groups=("group 0",), betas=(0.9, 0.999))


def sizes(*ends, start=0.1, count=9, zeros=0.0):
    """The RMS of each matrix: ``start`` on the first sample, then its end's share of it."""
    written = {name: [start] + [start * end] * (count - 1) for name, end in zip(SHAPES, ends, strict=False)}
    return {"weight.rms": written, "weight.zero_share": {name: [zeros] * count for name in written}}


def told(columns, facts=PLAN):
    return [(item.step, item.severity) for item in findings(CollapsingWeight(), {"optimizer.learning_rate": "1e-2 x9"}, columns, facts)]


@pytest.mark.parametrize(("ends", "fires"), [((0.31,) * 3, 0), ((0.29,) * 3, 1), ((0.29, 0.29, 1), 1), ((0.29, 0.31, 1), 0), ((0.01, 0.68, 0.7), 0)])
def test_limit_of_the_median_and_the_fifth_sample(ends, fires):
    assert told(sizes(*ends)) == [(5, Severity.WARNING)] * fires
    assert told(sizes(*ends, count=5)) == []


def test_with_two_matrices_both_and_further():
    two = plan({"a.weight": (8, 8), "b.weight": (8, 8)})
    assert told(sizes(0.09, 0.09), two) == [(5, Severity.WARNING)]
    assert told(sizes(0.11, 0.01), two) == []


def test_a_lone_matrix_may_fit_its_data_unless_it_is_decayed():
    assert told(sizes(0.01), plan({"a.weight": (8, 8)})) == []
    assert told(sizes(0.01), plan({"a.weight": (8, 8)}, None, DECAY)) == [(5, Severity.WARNING)]


def behind(*names):
    return dataclasses.replace(PLAN, layers=tuple(Layer(f"norm{name}", "BatchNorm1d", "batch_norm", after=(name,)) for name in names))


def test_layers_in_front_of_a_normalisation_do_not_count():
    assert told(sizes(0.1, 0.1, 0.1), behind("a", "b", "c")) == []
    assert told(sizes(0.01, 0.9, 0.9), behind("b")) == []
    assert told(sizes(0.05, 0.9, 0.05), behind("b")) == [(5, Severity.WARNING)], "two are left"


def test_with_normalisation_at_an_unknown_place_it_is_information():
    facts = plan({**SHAPES, "norm.weight": (8,)}, {"role": {"norm.weight": "norm"}})
    assert told(sizes(0.1, 0.1, 0.1), facts) == [(5, Severity.INFO)]


def test_pruned_tiny_frozen_and_unknown_weights_do_not_count():
    assert told(sizes(0.1, 0.1, 0.1, zeros=0.51)) == []
    assert told(sizes(0.1, 0.1, 0.1, start=0.9e-3)) == []
    assert told(sizes(0.1, 0.1, 0.1), plan(SHAPES, {"trainable": dict.fromkeys(SHAPES, False)})) == []
    assert told(sizes(*[float("nan")] * 3)) == []


def test_the_fix_carries_the_decay():
    (found,) = findings(
        CollapsingWeight(), {"optimizer.learning_rate": "1e-2 x9"}, sizes(0.1, 0.1, 0.1), plan(SHAPES, None, DECAY, planned_steps=1000)
    )
    assert found.fixes[0] == "set the weight decay to 0.01 (now 5)"
    assert found.causes[0] == "weight decay too strong"
    (found,) = findings(CollapsingWeight(), None, sizes(0.1, 0.1, 0.1), PLAN)
    assert found.causes == ("a penalty on the weights (L1, L2, kernel_regularizer) too strong",)


def test_coverage_counts_samples():
    rule = CollapsingWeight()
    drive(rule, snapshots(None, sizes(1, 1, 1, count=3)), PLAN)
    assert rule.missing() == "3 of 5 samples"

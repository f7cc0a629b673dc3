from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, plan, run
from trainvet.rules.symmetric_initialisation import SymmetricInitialisation

SHAPES = {"a.weight": (64, 32), "b.weight": (64, 64), "c.weight": (64, 64), "d.weight": (64, 64), "e.weight": (10, 64), "a.bias": (64,)}
PLAN = plan(SHAPES)
MATRICES = [name for name in SHAPES if name.endswith("weight")]


def columns(constant=(), equal=(), together=(), count=6, shapes=SHAPES):
    """Matrices that are ``constant`` after the first step, have ``equal`` rows, or ``together`` equal rows in weight and gradient."""
    return {
        "weight.min": {name: [0.5 if name in constant else -0.1] * count for name in shapes},
        "weight.max": {name: [0.5 if name in constant else 0.1] * count for name in shapes},
        "weight.identical_rows": {name: [float(name in (*constant, *equal, *together))] * count for name in shapes},
        "gradient.identical_rows": {name: [float(name in together)] * count for name in shapes},
    }


def fires(facts=PLAN, **how):
    return run(SymmetricInitialisation(), None, columns(**how), facts)


def test_random_matrices_are_quiet():
    assert fires() == []


@pytest.mark.parametrize(("constant", "told"), [(3, []), (4, [(0, "WT107")]), (5, [(0, "WT107")])])
def test_more_than_sixty_percent_constant_after_the_first_step(constant, told):
    assert fires(constant=MATRICES[:constant]) == told


def test_four_of_six_are_enough():
    six = {**SHAPES, "f.weight": (64, 64)}
    assert run(SymmetricInitialisation(), None, columns(constant=MATRICES[:4], shapes=six), plan(six)) == [(0, "WT107")]


def test_constant_up_to_rounding():
    table = columns()
    table["weight.min"] = dict.fromkeys(SHAPES, [0.01] * 6)
    table["weight.max"] = dict.fromkeys(SHAPES, [0.010000001] * 6)
    assert run(SymmetricInitialisation(), None, table, PLAN) == [(0, "WT107")]
    table["weight.max"] = dict.fromkeys(SHAPES, [0.0101] * 6)
    assert run(SymmetricInitialisation(), None, table, PLAN) == []


def spread(mean, std, moved=0.001, names=MATRICES):
    """Matrices whose elements differ, around a mean, after an update of RMS ``moved``."""
    table = columns(shapes=names)
    for key, value in (("weight.mean", mean), ("weight.std", std), ("update.rms", moved)):
        table[key] = dict.fromkeys(names, [value] * 6)
    return table


@pytest.mark.parametrize(
    ("mean", "std", "moved", "told"),
    [
        (0.1, 0.0049, 0.005, True),
        (-0.1, 0.0049, 0.005, True),
        (0.1, 0.0051, 0.005, False),
        (0.001, 0.02, 0.001, False),  # random
        (0.0, 0.0, 0.0, False),  # min and max say whether it is constant
        (-1.0, 0.02, 1.0, False),  # a huge step in one direction
        (0.1, 0.004, 0.049, True),
        (0.1, 0.004, 0.051, False),
        (0.1, 0.004, float("nan"), True),
    ],
)
def test_a_constant_that_dropout_has_parted_a_little_in_the_first_update(mean, std, moved, told):
    assert run(SymmetricInitialisation(), None, spread(mean, std, moved), PLAN) == ([(0, "WT107")] if told else [])


def test_later_samples_are_not_judged_by_their_spread():
    assert run(SymmetricInitialisation(), None, spread(0.1, 0.001), PLAN, (50, 100, 150, 200, 250, 300)) == []


def test_a_run_that_is_seen_too_late_is_not_judged_by_the_share():
    assert run(SymmetricInitialisation(), None, columns(constant=MATRICES), PLAN, (50, 100, 150, 200, 250, 300)) == []


def test_equal_rows_with_equal_gradients_on_five_samples():
    found = findings(SymmetricInitialisation(), None, columns(together=["b.weight"]), PLAN)
    assert [(item.step, item.first_step, item.subjects) for item in found] == [(4, 0, ("b.weight",))]
    assert run(SymmetricInitialisation(), None, columns(together=["b.weight"], count=4), PLAN) == []


def test_equal_rows_alone_are_no_matter():
    """A zero-initialised output layer: its rows are equal, their gradients are not."""
    assert fires(equal=["e.weight"]) == []


def test_a_tensor_is_told_once():
    assert fires(together=MATRICES) == [(0, "WT107")]


def test_one_matrix_alone_may_be_zero():
    assert run(SymmetricInitialisation(), None, columns(constant=["a.weight"], shapes=["a.weight"]), plan({"a.weight": (10, 64)})) == []


def test_zero_heads_on_a_frozen_backbone_are_no_matter():
    frozen = plan(SHAPES, {"trainable": dict.fromkeys(("a.weight", "b.weight", "c.weight"), False)})
    assert run(SymmetricInitialisation(), None, columns(constant=["d.weight", "e.weight"], shapes=["d.weight", "e.weight"]), frozen) == []


@pytest.mark.parametrize("change", [{"resumed": True}, {"pretrained": True}])
def test_loaded_weights_are_not_judged_and_it_is_said(change):
    facts = dataclasses.replace(PLAN, **change)
    assert fires(facts, together=MATRICES) == []
    rule = SymmetricInitialisation()
    rule.begin(facts)
    assert rule.missing() == "not judged: the weights were loaded"


def test_exempt_tensors():
    together = ["b.weight"]
    for role in ("norm", "embedding"):
        assert fires(plan(SHAPES, {"role": {"b.weight": role}}), together=together) == []
    assert fires(plan(SHAPES, {"shape": {"b.weight": (1, 64)}}), together=together) == [], "one row"
    assert fires(plan(SHAPES, {"shape": {"b.weight": (64, 1, 1)}}), together=together) == [], "a scale per channel"
    assert fires(plan(SHAPES, {"trainable": {"b.weight": False}}), together=together) == []


def test_nan_gives_no_verdict():
    table = {key: {name: [float("nan")] * 6 for name in SHAPES} for key in columns()}
    assert run(SymmetricInitialisation(), None, table, PLAN) == []


def test_the_fix_names_tensor_and_initialiser():
    found = findings(SymmetricInitialisation(), None, columns(together=["a.weight"]), PLAN)[0]
    assert found.fixes[0] == "initialise a.weight with He (Kaiming), a std of 0.25, in front of a ReLU, else with Glorot (Xavier), 0.14"
    keras = dataclasses.replace(PLAN, framework="keras")
    assert "a std of 0.18" in findings(SymmetricInitialisation(), None, columns(together=["a.weight"]), keras)[0].fixes[0]
    lstm = plan(SHAPES, {"module_type": {"a.weight": "LSTM"}})
    assert "orthogonally" in findings(SymmetricInitialisation(), None, columns(together=["a.weight"]), lstm)[0].fixes[0]

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import drive, findings, plan, run, snapshots
from trainvet.finding import Severity
from trainvet.rules.vanishing_gradient import VanishingGradient
from trainvet.statistics import Facts, Optimizer

SHAPES = {f"layers.{index}.weight": (8, 8) for index in range(8)}
AT = (*range(10), *range(19, 400, 10))
DENSE, SPARSE = 10, 20
SGD = plan(SHAPES, optimizer=Optimizer("optimizer", "SGD", "sgd", momentum=0.0, groups=("group 0",)))
ADAM = plan(SHAPES)
RATE = {"optimizer.learning_rate": "0.1 x230"}
ALL = tuple(range(8))


def columns(small, layers=(0,), early=None, others=1e-2, weight=0.1, samples=SPARSE):
    """RMS of the gradients: ``others``, but ``small`` (one number or one for each sample) in some layers, and ``early`` in the first 10."""
    course = np.broadcast_to(np.asarray(small, dtype=float), samples)
    rms = {}
    for index, name in enumerate(SHAPES):
        low = np.concatenate([np.full(DENSE, course[0] if early is None else early), course])
        rms[name] = low if index in layers else np.full(DENSE + samples, others)
    present = {name: np.ones(DENSE + samples) for name in SHAPES}
    return {
        "gradient.rms": rms,
        "gradient.abs_max": rms,
        "gradient.present": present,
        "weight.rms": {name: np.full(DENSE + samples, weight) for name in SHAPES},
    }


def told(table, facts=SGD, tracks=RATE):
    return run(VanishingGradient(), tracks, table, facts, AT)


@pytest.mark.parametrize(("small", "expected"), [(6.1e-8, []), (5.9e-8, [(59, "GR102")]), (0.0, [])])
def test_sgd_steps_that_are_lost_in_rounding(small, expected):
    """0.1 · g / 0.1 < 6e-8 on the fifth sample after step 10. The last matrices are as small, so that nothing fades with depth."""
    assert told(columns(small, layers=ALL)) == expected


def test_the_sample_before_is_quiet_and_all_five_must_hold():
    assert told(columns(1e-8, layers=ALL, samples=4)) == []
    assert told(columns([1e-8, 1e-8, 1e-8, 1e-8, 1e-2] * 4, layers=ALL, early=1e-8)) == []


def test_momentum_makes_the_step_longer():
    heavy = dataclasses.replace(SGD, optimizers=(dataclasses.replace(SGD.optimizers[0], momentum=0.9),))
    assert told(columns(5.9e-8, layers=ALL), heavy) == []
    assert told(columns(5.9e-9, layers=ALL), heavy) == [(59, "GR102")]


@pytest.mark.parametrize(("rates", "expected"), [("0.1 x10, 0.0101 x220", 1), ("0.1 x10, 0.0099 x220", 0), ("0.01..0.1 x230", 0), ("0.1 x230", 1)])
def test_rounding_only_with_a_settled_rate(rates, expected):
    """Not below 10 % of the peak, not while the rate rises."""
    assert len(told(columns(1e-9, layers=ALL), SGD, {"optimizer.learning_rate": rates})) == expected


def test_rounding_needs_the_rate_and_a_weight():
    assert told(columns(1e-9, layers=ALL), SGD, {}) == []
    assert told(columns(1e-9, layers=ALL, weight=0.0)) == []


@pytest.mark.parametrize(("small", "layers", "expected"), [(9e-8, (3, 4, 5), 1), (1.1e-7, (3, 4, 5), 0), (9e-8, (3, 4), 0), (9e-8, ALL, 1)])
def test_adam_gradients_beside_epsilon(small, layers, expected):
    """RMS < 10 · 1e-8 in more than a quarter of 8 matrices."""
    assert len(told(columns(small, layers), ADAM)) == expected


def test_a_larger_epsilon_hides_more():
    keras = plan(SHAPES, optimizer=Optimizer("optimizer", "Adam", "adam", 1e-7, groups=("group 0",)))
    assert [step for step, _ in told(columns(9e-7, ALL), keras)] == [59]
    assert told(columns(9e-7, ALL), ADAM) == []


@pytest.mark.parametrize(("small", "expected"), [(0.9e-5, 1), (1.1e-5, 0)])
def test_fading_over_depth(small, expected):
    """A quarter of 8 matrices are 2; the larger one against the median of the last two."""
    assert len(told(columns(small, layers=(0, 1)), ADAM)) == expected
    assert told(columns(small, layers=(0,)), ADAM) == []
    assert told(columns(small, layers=(6, 7)), ADAM) == []


def transformer(query, value):
    """Four blocks of six matrices: queries and keys, values and the rest, whose gradients grow over depth to 1e-2."""
    names = [f"blocks.{block}.{part}" for block in range(4) for part in ("query", "key", "value", "out", "up", "down")]
    rms = {name: np.full(DENSE + SPARSE, query if name.endswith(("query", "key")) and name < "blocks.2" else 1e-2) for name in names}
    rms |= {f"blocks.0.{part}": np.full(DENSE + SPARSE, value) for part in ("value", "out", "up", "down")}
    table = dict.fromkeys(("gradient.rms", "gradient.abs_max"), rms)
    table |= {key: {name: np.ones(DENSE + SPARSE) for name in names} for key in ("gradient.present", "weight.rms")}
    return table, plan(dict.fromkeys(names, (8, 8)), optimizer=Optimizer("optimizer 0", "AdamW", "adam", 1e-12, groups=("group 0",)))


@pytest.mark.parametrize(("value", "expected"), [(1e-2, 0), (1.1e-5, 0), (0.9e-5, 1)])
def test_queries_and_keys_of_uniform_attention_do_not_speak_for_their_layer(value, expected):
    assert len(told(*transformer(2e-8, value))) == expected


def test_fading_needs_four_matrices_of_known_place():
    unknown = plan(SHAPES, {"depth": dict.fromkeys(list(SHAPES)[:5], -1)})
    assert told(columns(1e-6, layers=(0, 1, 5)), unknown) == []
    known = plan(SHAPES, {"depth": dict.fromkeys(list(SHAPES)[:4], -1)})
    assert len(told(columns(1e-6, layers=(4,)), known)) == 1


def test_the_finding_names_the_layers_upstream_first():
    (found,) = findings(VanishingGradient(), RATE, columns(1e-9, (0, 1, 2)), ADAM, AT)
    assert found.subjects == ("layers.0.weight", "layers.1.weight", "layers.2.weight")
    assert (found.severity, found.first_step) == (Severity.WARNING, 19)
    assert "fades from 0.01 in the last matrices to 1e-09" in found.message
    assert "below 10 times Adam's epsilon in 3 of 8 matrices" in found.message
    assert found.fixes[0] == "set Adam's epsilon to about 1e-10 (now 1e-08)"


@pytest.mark.parametrize(("layers", "severity"), [((0, 1, 2), Severity.WARNING), ((0, 1, 2, 3), Severity.ERROR)])
def test_an_error_where_half_of_the_matrices_are_concerned(layers, severity):
    assert [item.severity for item in findings(VanishingGradient(), RATE, columns(1e-9, layers), ADAM, AT)] == [severity]


def test_told_once_until_it_was_clear():
    assert len(told(columns([1e-9] * 20, (0, 1)), ADAM)) == 1
    assert [step for step, _ in told(columns([1e-9] * 6 + [1e-2] + [1e-9] * 13, (0, 1), early=1e-9), ADAM)] == [59, 129]
    assert len(told(columns([1e-9] * 6 + [1.5e-5] + [1e-9] * 13, (0, 1), early=1e-9), ADAM)) == 1


def test_gradients_that_fade_evenly_from_a_healthy_start_are_convergence():
    """Full-batch descent on a convex problem: everything goes to 0 together."""
    course = np.geomspace(1e-2, 1e-12, SPARSE)
    assert told(columns(course, ALL, early=1e-2), SGD) == []
    assert told(columns(course, ALL, early=1e-2), ADAM) == []
    assert len(told(columns(course, (0, 1, 2), early=1e-2), ADAM)) >= 1


@pytest.mark.parametrize(("end", "expected"), [(0.009, 0), (0.011, 1)])
def test_a_loss_below_one_percent_of_its_start_has_converged(end, expected):
    assert len(told(columns(1e-9, (0, 1)), ADAM, {"loss.value": f"1 x20, {end} x230"})) == expected


def test_quiet_for_gradients_of_exactly_zero_and_for_none():
    """They are GR104's; and an expert that sees no sample in a batch has a gradient of 0."""
    assert told(columns(0.0, (0, 1, 2)), ADAM) == []
    table = columns(1e-12, (0, 1, 2))
    table["gradient.present"] |= {name: np.zeros(DENSE + SPARSE) for name in list(SHAPES)[:3]}
    assert told(table, ADAM) == []


def test_an_rms_that_underflows_is_no_gradient_of_zero():
    """The squares of 1e-25 are 0 in float32, the largest element is not."""
    table = columns(0.0, (0, 1))
    table["gradient.abs_max"] = {name: np.full(DENSE + SPARSE, 1e-25) for name in SHAPES}
    assert len(told(table, ADAM)) == 1


EXEMPT = {
    "embedding": {"role": dict.fromkeys(list(SHAPES)[:2], "embedding")},
    "frozen": {"trainable": dict.fromkeys(list(SHAPES)[:2], False)},
    "tied": {"tied_to": dict.fromkeys(list(SHAPES)[:2], "layers.7.weight")},
    "vectors": {"shape": dict.fromkeys(list(SHAPES)[:2], (8,))},
}


@pytest.mark.parametrize("changes", EXEMPT.values(), ids=EXEMPT.keys())
def test_quiet(changes):
    assert told(columns(1e-9, (0, 1)), plan(SHAPES, changes)) == []
    assert len(told(columns(1e-9, (2, 3)), plan(SHAPES, changes))) == 1


def test_quiet_where_no_optimizer_holds_it():
    held = dataclasses.replace(ADAM.optimizers[0], parameters=tuple(SHAPES)[2:])
    assert told(columns(1e-9, (0, 1)), dataclasses.replace(ADAM, optimizers=(held,))) == []
    assert told(columns(1e-9, (0, 1)), Facts()) == []


def test_zero_initialised_branches_are_small_within_the_first_ten_steps_only():
    assert told(columns(1e-2, (0, 1, 2), early=1e-12), ADAM) == []


def test_a_resumed_run_that_was_converged_is_quiet():
    facts = dataclasses.replace(ADAM, resumed=True)
    assert told(columns(1e-9, ALL), facts) == []
    assert len(told(columns(1e-9, (0, 1)), facts)) == 1


def test_each_optimizer_by_itself():
    """Two networks under one roof: the first half belongs to another optimizer whose gradients are small throughout."""
    names = tuple(SHAPES)
    both = tuple(Optimizer(f"optimizer {index}", "Adam", "adam", 1e-8, parameters=names[4 * index : 4 * index + 4]) for index in range(2))
    facts = dataclasses.replace(ADAM, optimizers=both)
    assert told(columns(1e-6, (0, 1, 2, 3)), facts) == []
    assert [item.subjects for item in findings(VanishingGradient(), None, columns(1e-9, (0, 1, 2, 3)), facts, AT)] == [names[:4]]


def test_without_weights_the_other_checks_go_on():
    table = columns(1e-9, (0, 1))
    del table["weight.rms"]
    assert len(told(table, ADAM)) == 1
    assert told(columns(1e-9, ALL) | {"weight.rms": {"other": np.ones(30)}}, SGD) == []


def test_missing_evidence_is_said():
    rule = VanishingGradient()
    assert rule.missing() == "0 of 5 samples after step 10"
    drive(rule, snapshots(columns=columns(1e-2, samples=4), at=AT), ADAM)
    assert rule.missing() == "4 of 5 samples after step 10"
    drive(rule, snapshots(columns=columns(1e-2), at=AT), ADAM)
    assert rule.missing() == ""

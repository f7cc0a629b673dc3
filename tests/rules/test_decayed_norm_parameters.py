from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, plan
from trainvet.finding import Severity
from trainvet.rules.decayed_norm_parameters import DecayedNormParameters
from trainvet.statistics import Optimizer

SHAPES = {"embed.weight": (100, 8), "fc.weight": (8, 8), "fc.bias": (8,), "norm.weight": (8,)}
ADAMW = Optimizer("AdamW", "AdamW", "adam", 1e-8, weight_decay=0.01, betas=(0.9, 0.999), decayed=("fc.weight",))
ROLES = {"role": {"embed.weight": "embedding", "fc.bias": "bias", "norm.weight": "norm"}}


def told(**changes):
    return findings(DecayedNormParameters(), facts=plan(SHAPES, ROLES, dataclasses.replace(ADAMW, **changes)))


@pytest.mark.parametrize("name", ["embed.weight", "fc.bias", "norm.weight"])
def test_a_decayed_gain_bias_or_embedding_is_information(name):
    (found,) = told(decayed=("fc.weight", name))
    assert (found.severity, found.subjects) == (Severity.INFO, (name,))
    assert found.fixes == ("give gains, biases and embeddings a group of their own with weight_decay=0",)


def test_adam_with_coupled_decay_is_information():
    (found,) = told(type="Adam", coupled_decay=True)
    assert found.fixes == ("use AdamW with the same weight_decay",)
    assert told(type="SGD", family="sgd", coupled_decay=True) == []


@pytest.mark.parametrize("changes", [{}, {"decayed": ()}, {"weight_decay": 0.0, "decayed": tuple(SHAPES)}])
def test_quiet(changes):
    assert told(**changes) == []


def test_told_once_and_coverage():
    rule = DecayedNormParameters()
    assert rule.missing() == "no optimizer is known"
    facts = plan(SHAPES, ROLES, dataclasses.replace(ADAMW, decayed=tuple(SHAPES)))
    assert len(list(rule.begin(facts))) == 1
    assert list(rule.begin(facts)) == []
    assert rule.missing() == ""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.series import drive, findings, plan, snapshots, well_worded
from trainvet.finding import Severity
from trainvet.rules.misused_loss_scaler import MisusedLossScaler
from trainvet.statistics import Facts, Subject

STEPS = {"run.gradient_norm": "1 x9"}
SHAPES = {"a.weight": (8, 8), "b.weight": (8, 8)}


def seen(**changes):
    return plan(SHAPES, {key: dict.fromkeys(SHAPES, value) for key, value in changes.pop("parameters", {}).items()}, **changes)


def site(module="a", dtype="float16"):
    return Subject(module, "activation", module, "Linear", shape=(4, 8), dtype=dtype)


def also(facts, *subjects, **changes):
    return dataclasses.replace(facts, subjects=(*facts.subjects, *subjects), **changes)


FIRES = {
    "autocast to float16": seen(autocast="float16"),
    "a float16 model": seen(parameters={"dtype": "float16"}),
    "outputs in float16, whoever made them so": also(seen(), site()),
    "16-true by name": seen(precision="16-true"),
    "bfloat16 with a scaler": seen(autocast="bfloat16", loss_scaler=True),
    "bf16-mixed by name with a scaler": seen(precision="bf16-mixed", loss_scaler=True),
}
FROZEN = plan({**SHAPES, "teacher.weight": (8, 8)}, {"trainable": {"teacher.weight": False}, "dtype": {"teacher.weight": "float16"}})
QUIET = {
    "float32": seen(),
    "float16 with a scaler": seen(autocast="float16", loss_scaler=True),
    "bfloat16 without one": seen(autocast="bfloat16"),
    "mixed_float16 with a scaler": seen(precision="mixed_float16", loss_scaler=True),
    "autocast to bfloat16 although the name says 16": seen(precision="16-mixed", autocast="bfloat16"),
    "a frozen float16 teacher": also(FROZEN, site("teacher")),
    "nothing is known": Facts(),
    "no optimizer yet": dataclasses.replace(seen(autocast="float16"), optimizers=()),
    "float64": seen(precision="64-true"),
}


@pytest.mark.parametrize("facts", FIRES.values(), ids=FIRES)
def test_it_speaks_once_when_it_becomes_known(facts):
    found = findings(MisusedLossScaler(), STEPS, facts=facts)
    assert [(item.step, item.severity) for item in found] == [(0, Severity.WARNING)]
    rule = MisusedLossScaler()
    assert list(rule.begin(seen())) == []
    assert len(list(rule.begin(facts))) == 1
    assert list(rule.begin(facts)) == []


@pytest.mark.parametrize("facts", QUIET.values(), ids=QUIET)
def test_quiet(facts):
    assert findings(MisusedLossScaler(), STEPS, facts=facts) == []


@pytest.mark.parametrize(
    ("framework", "text"), [("lightning", "16-mixed"), ("keras", "LossScaleOptimizer(optimizer)"), ("torch", "torch.amp.GradScaler")]
)
def test_the_fix_is_the_frameworks(framework, text):
    (found,) = findings(MisusedLossScaler(), STEPS, facts=dataclasses.replace(seen(autocast="float16"), framework=framework))
    well_worded(found)
    assert text in found.fixes[0]


NORM = 1 + 0.5 * np.sin(np.arange(60))
SCALE = np.where(np.arange(60) < 30, 65536.0, 32768.0)
SCALED = seen(autocast="float16", loss_scaler=True)


def clipping(after, scale=SCALE, clip=None, count=60):
    """Norm before clipping, norm after it over norm before, and scale."""
    share = np.minimum(after / NORM, 1) if clip is None else clip
    return {"run.gradient_norm": NORM[:count], "run.clip_scale": share[:count], "run.loss_scale": scale[:count]}


def test_clipping_scaled_gradients_is_seen_by_the_threshold():
    facts = dataclasses.replace(SCALED, clipping=0.5, clipping_by="norm")
    found = findings(MisusedLossScaler(), clipping(0.5 / SCALE), None, facts)
    assert [item.severity for item in found] == [Severity.WARNING]
    assert 19 <= found[0].step <= 27
    assert found[0].fixes == ("call scaler.unscale_(optimizer) before the gradients are clipped",)
    assert findings(MisusedLossScaler(), clipping(0.5 / SCALE, count=19), None, facts) == []


def test_clipping_scaled_gradients_is_seen_by_two_scales():
    found = findings(MisusedLossScaler(), clipping(0.7 / SCALE), None, SCALED)
    assert [item.severity for item in found] == [Severity.WARNING]
    assert found[0].step >= 49, "twenty steps under each scale"


def test_clipping_as_it_should_be_is_quiet():
    known = dataclasses.replace(SCALED, clipping=0.5, clipping_by="norm")
    for facts in (SCALED, known):
        assert findings(MisusedLossScaler(), clipping(np.full(60, 0.5)), None, facts) == []
        assert findings(MisusedLossScaler(), clipping(np.full(60, 9.0)), None, facts) == [], "nothing is clipped"
        assert findings(MisusedLossScaler(), clipping(None, clip=np.full(60, np.nan)), None, facts) == []
    assert findings(MisusedLossScaler(), clipping(0.7 / SCALE, np.full(60, 65536.0)), None, SCALED) == [], "one scale proves nothing"


def test_coverage():
    rule = MisusedLossScaler()
    drive(rule, snapshots(STEPS), seen())
    assert rule.missing() == "no float16, no bfloat16 and no loss scaler was seen"
    assert list(rule.begin(SCALED)) == []
    assert rule.missing() == ""

from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, plan
from trainvet.finding import Severity
from trainvet.monitor import Monitor
from trainvet.rules.poisoned_buffer import PoisonedBuffer
from trainvet.selection import choose
from trainvet.statistics import Subject

SHAPES = {"fc.weight": (8, 8)}
PLAN = plan(SHAPES)
PLAN = dataclasses.replace(PLAN, subjects=(*PLAN.subjects, *(Subject(name, "buffer", "bn") for name in ("bn.running_mean", "bn.running_var"))))
LOSS = {"loss.value": "1 x20", "run.gradient_norm": "1 x20"}
NAN = float("nan")


def columns(mean, var="0 x20", weights="0 x20"):
    return {
        "buffer.nonfinite": {"bn.running_mean": mean, "bn.running_var": var},
        "weight.nan": {"fc.weight": weights},
        "weight.inf": {"fc.weight": "0 x20"},
    }


def told(columns_, tracks=LOSS, facts=PLAN):
    return [(item.step, item.first_step, item.severity) for item in findings(PoisonedBuffer(), tracks, columns_, facts)]


def test_one_element_is_enough_at_once():
    assert told(columns("0 x7, 1 x13")) == [(7, 7, Severity.FATAL)]
    assert told(columns("0 x20")) == []


def test_buffers_that_go_bad_together_are_told_together_and_again_after_they_were_fine():
    found = findings(PoisonedBuffer(), LOSS, columns("0 x7, 8 x13", "0 x7, 8 x13"), PLAN)
    assert [item.subjects for item in found] == [("bn.running_mean", "bn.running_var")]
    assert found[0].evidence["elements"] == 16
    assert told(columns("0 x7, 1 x3, 0 x3, 1 x7")) == [(7, 7, Severity.FATAL), (13, 13, Severity.FATAL)]


def test_masks_are_exempt():
    assert told(columns("3 x20")) == []
    assert told(columns("3 x10, 0 x3, 3 x7")) == []


def test_where_the_weights_are_gone_too_another_rule_speaks():
    assert told(columns("0 x7, 1 x13", weights="0 x7, 64 x13")) == []


@pytest.mark.parametrize("key", ["loss.value", "run.gradient_norm"])
def test_a_bad_step_that_spared_the_weights_is_told_when_the_loss_is_fine_again(key):
    dropped = LOSS | {key: [1.0] * 7 + [NAN] + [1.0] * 12}
    assert told(columns("0 x7, 1 x13"), dropped) == [(8, 7, Severity.FATAL)]
    skipped = dropped | {"run.skipped": "0 x7, 1, 0 x12"}
    assert told(columns("0 x7, 1 x13"), skipped) == [(7, 7, Severity.FATAL)]


def test_the_fix_names_layer_and_checkpoint():
    (found,) = findings(PoisonedBuffer(), LOSS, columns("0 x7, 1 x13"), PLAN)
    assert found.fixes[1] == "call bn.reset_running_stats() and train on, or load a checkpoint written at or before step 6"
    assert "before the forward pass" in found.fixes[0]
    (found,) = findings(PoisonedBuffer(), LOSS, columns("0 x7, 1 x13"), dataclasses.replace(PLAN, framework="keras"))
    assert "dataset.filter" in found.fixes[0]
    assert "reset_running_stats" not in found.fixes[1]


def test_the_monitor_shows_it_what_is_poisoned():
    from tests.series import snapshots

    monitor = Monitor(choose(("NF103",)))
    monitor.begin(PLAN)
    for snapshot in snapshots(LOSS, columns("0 x7, 1 x13")):
        monitor.observe(snapshot)
    assert [item.code for item in monitor.end().findings] == ["NF103"]

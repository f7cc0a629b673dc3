from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.rules.unconnected_module import UnconnectedModule
from trainvet.statistics import Facts, Subject


def facts(*names, trainable=True):
    return Facts(subjects=tuple(Subject(name, "module", name, "Linear", depth, trainable=trainable) for depth, name in enumerate(names)))


def called(**written):
    return {"module.called": {name.replace("__", "."): value for name, value in written.items()}}


def test_a_forgotten_layer_after_twenty_samples():
    table = called(body="1 x30", forgotten="0 x30")
    (found,) = findings(UnconnectedModule(), None, table, facts("body", "forgotten"))
    assert (found.code, found.step, found.first_step, found.subjects) == ("MO103", 19, 0, ("forgotten",))


@pytest.mark.parametrize(
    ("table", "plan"),
    [
        (called(body="1 x19", forgotten="0 x19"), facts("body", "forgotten")),
        (called(body="1 x30", rare="0 x19, 1, 0 x10"), facts("body", "rare")),
        (called(body="1 x30", frozen="0 x30"), facts("body", "frozen", trainable=False)),
        (called(body="0 x30", other="0 x30"), facts("body", "other")),
        (called(gate="1 x30", experts__0="1 x30", experts__1="0 x30"), facts("gate", "experts.0", "experts.1")),
        (called(body="1 x30", forgotten=[float("nan")] * 30), facts("body")),
    ],
)
def test_quiet(table, plan):
    assert run(UnconnectedModule(), None, table, plan) == []


def test_a_whole_list_that_nobody_calls():
    table = called(body="1 x30", old__0="0 x30", old__1="0 x30")
    (found,) = findings(UnconnectedModule(), None, table, facts("body", "old.0", "old.1"))
    assert found.subjects == ("old.0", "old.1")
    assert UnconnectedModule().missing() == "0 of 20 samples"

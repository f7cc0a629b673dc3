from __future__ import annotations

import dataclasses

import pytest

from tests.series import findings, run
from trainvet.finding import Severity
from trainvet.rules.wrong_mode import WrongMode
from trainvet.statistics import Facts, Layer, Optimizer, Subject


def weight(name, trainable=True):
    return Subject(name, "parameter", name.rpartition(".")[0], shape=(4, 4), trainable=trainable)


PLAN = Facts(
    subjects=(weight("net.0.weight"), weight("net.1.weight"), weight("net.3.weight"), weight("head.weight")),
    layers=(
        Layer("net.0", "Linear", "linear", trainable=True),
        Layer("net.1", "BatchNorm1d", "batch_norm", trainable=True, owns=True),
        Layer("net.2", "Dropout", "dropout", rate=0.3),
        Layer("head", "Linear", "linear", trainable=True),
    ),
)
FROZEN = dataclasses.replace(PLAN, subjects=(weight("net.0.weight", False), weight("net.1.weight", False), weight("head.weight")))


def modes(body="0 x9", drop=None, head="1 x9"):
    written = {"net.0": body, "net.1": body, "net.2": body if drop is None else drop, "head": head}
    return {"module.training": written, "module.called": dict.fromkeys(written, "1 x9")}


def test_a_body_in_evaluation_mode_names_the_outermost_module():
    (found,) = findings(WrongMode(), None, modes(), PLAN)
    assert (found.code, found.step, found.first_step, found.subjects, found.severity) == ("MO104", 2, 0, ("net",), Severity.ERROR)
    assert found.fixes[0] == "call net.train() before the training step"


@pytest.mark.parametrize(
    ("table", "facts"),
    [
        (modes("1 x9"), PLAN),
        (modes("0, 0, 1 x7"), PLAN),
        (modes("0, 0, 1, 0, 0, 1, 1, 1, 1"), PLAN),
        (modes(), FROZEN),
        (modes(), dataclasses.replace(PLAN, finetuning=True)),
        (modes("1 x9", drop="0 x9"), dataclasses.replace(PLAN, layers=(Layer("net.2", "Dropout", "dropout", rate=0.0),))),
        (modes(), dataclasses.replace(PLAN, optimizers=(Optimizer("optimizer", parameters=("head.weight",)),))),
        (modes(), Facts()),
        (modes([float("nan")] * 9), PLAN),
    ],
)
def test_quiet(table, facts):
    assert run(WrongMode(), None, table, facts) == []


def test_what_an_optimizer_holds_is_judged():
    facts = dataclasses.replace(PLAN, optimizers=(Optimizer("optimizer", parameters=("net.0.weight",)),))
    (found,) = findings(WrongMode(), None, modes(), facts)
    assert found.subjects == ("net",)


def test_layers_that_no_forward_called_are_not_judged():
    table = modes()
    table["module.called"] = dict.fromkeys(table["module.called"], "0 x9")
    assert run(WrongMode(), None, table, PLAN) == []


def test_one_dropout_alone_is_named_itself():
    (found,) = findings(WrongMode(), None, modes("1 x9", drop="0 x9"), PLAN)
    assert found.subjects == ("net.2",)
    assert found.message == "dropout ran in evaluation mode in the training forward"


def test_statistics_of_loaded_weights_are_information():
    plan = dataclasses.replace(PLAN, pretrained=True)
    table = modes("1 x9")
    table["module.training"]["net.1"] = "0 x9"
    (found,) = findings(WrongMode(), None, table, plan)
    assert found.severity == Severity.INFO


def test_training_mode_during_an_evaluation_is_a_warning_once():
    table = {"validation_module.training": {"net.1": "1 x4", "net.2": "0 x4"}}
    (found,) = findings(WrongMode(), None, table, PLAN)
    assert (found.step, found.severity, found.subjects) == (0, Severity.WARNING, ("net.1",))
    assert run(WrongMode(), None, {"validation_module.training": {"net.1": "0 x4"}}, PLAN) == []


def test_coverage():
    rule = WrongMode()
    assert rule.missing() == "a traced training step with dropout or batch normalisation"
    list(rule.begin(Facts(layers=(Layer("a", "Linear", "linear"),))))
    assert rule.missing() == "no dropout or batch normalisation that trains"

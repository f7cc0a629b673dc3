"""The benchmark of detection: its arithmetic at the margins, and that each fault changes what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.detection.__main__ import choose
from benchmarks.detection.fixes import understood
from benchmarks.detection.harm import harmed
from benchmarks.detection.operators_settings import SHARED
from benchmarks.detection.run import Job, known, work
from benchmarks.detection.score import Share, clopper_pearson, judge, poisson, summary, wilson
from benchmarks.detection.setup import Setup
from benchmarks.detection.table import markdown
from tests.examples.programs import needs, run
from trainvet.cause import CONSEQUENCES
from trainvet.rule import catalogue


def test_intervals_are_those_of_the_tables():
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert clopper_pearson(0, 36) == pytest.approx((0.0, 1 - 0.025 ** (1 / 36)), abs=1e-9)
    assert clopper_pearson(36, 36) == pytest.approx((0.025 ** (1 / 36), 1.0), abs=1e-9)
    assert clopper_pearson(1, 10) == pytest.approx((0.0025, 0.4450), abs=1e-4)
    assert poisson(0) == pytest.approx((0.0, 3.6889), abs=1e-4)
    assert poisson(5) == pytest.approx((1.6235, 11.6683), abs=1e-4)
    assert str(Share(0, 0)) == "no data"
    assert Share(4, 100).interval == clopper_pearson(4, 100)
    assert Share(5, 100).interval == wilson(5, 100)


def test_harm_is_a_tenth_of_the_healthy_score():
    assert not harmed(0.9, 1.0)
    assert harmed(0.8999, 1.0)
    assert harmed(math.nan, 1.0)
    assert not harmed(0.08, 0.1)
    assert harmed(0.0799, 0.1)


def finding(code: str, severity: str = "warning", step: int = 5, place: bool = True, consequences: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"code": code, "severity": severity, "step": step, "place": place, "consequences": list(consequences)}


def row(operator: str, *findings: dict[str, Any], score: float | None = 0.9, **more: Any) -> dict[str, Any]:
    fixed = {"right": ["WT104"], "structural": False, "onset": 2} if operator else {"learnt": 0.5}
    base = {"framework": "loop", "recipe": "a", "operator": operator, "seed": 0, "steps": 500, "crash": "", "errors": [], "score": score}
    return {**base, "findings": list(findings), **fixed, **more}


HEALTHY = row("")


def test_a_fault_counts_when_it_did_harm_or_is_one_by_construction_and_its_twin_has_learnt():
    assert judge(row("rate", score=0.5), HEALTHY).counted
    assert not judge(row("rate", score=0.85), HEALTHY).counted
    assert judge(row("rate", score=0.85, structural=True), HEALTHY).counted
    assert judge(row("rate", score=None), HEALTHY).harmed
    assert not judge(row("rate", score=0.1), row("", score=0.4)).counted
    assert not judge(row("rate", score=0.1), None).counted


def test_what_is_folded_counts_for_the_recall_but_not_for_the_headline():
    folded = judge(row("rate", finding("LO101", consequences=(finding("WT104", step=9),)), score=0.1), HEALTHY)
    assert (folded.alarmed, folded.diagnosed, folded.family, folded.headline, folded.delay) == (True, True, False, False, 7)
    elsewhere = judge(row("rate", finding("WT104", place=False), finding("LO101"), score=0.1), HEALTHY)
    assert (elsewhere.diagnosed, elsewhere.family, elsewhere.headline, elsewhere.delay) == (True, True, False, 3)
    informed = judge(row("rate", finding("WT104", severity="info"), score=0.1), HEALTHY)
    assert (informed.alarmed, informed.diagnosed, informed.delay) == (False, False, None)


def test_the_figures_of_a_few_runs():
    rows = [
        row("", finding("GR101"), finding("LR101", severity="info")),
        row("", recipe="b"),
        row("", recipe="c", score=0.4),
        row("", recipe="d", steps=0, errors=["KeyError"]),
        row("rate", finding("WT104"), finding("AC101"), score=0.1, understood=True, fixed_score=0.88),
        row("rate", score=0.1, recipe="b", understood=True, fixed_score=None),
        row("rate", finding("WT104"), score=0.89, recipe="b"),
        {"framework": "loop", "recipe": "a", "operator": "other", "seed": 0, "skipped": "does not apply"},
    ]
    figures = summary(rows)
    assert (figures["healthy runs"], figures["false alarms"], figures["healthy steps"], figures["not learnt"]) == (2, 1, 1000, 1)
    assert figures["false alarms per 1,000 steps"] == pytest.approx([1.0, 0.0253, 5.5716], abs=1e-4)
    assert (figures["runs of which nothing was observed"], figures["errors inside trainvet"]) == (1, 1)
    assert (figures["faults counted"], figures["faults without harm, not counted"]) == (2, 1)
    assert figures["precision of headlines"] == Share(1, 3)
    assert figures["recall"] == figures["first headline right, with its place"] == Share(1, 2)
    assert figures["first advice makes the run train"] == Share(1, 2)


def test_advice_is_followed_word_for_word_or_not_at_all():
    setup = Setup(None, None, (), None, (), None, rate=1.0)  # type: ignore[arg-type]
    for text in (
        "set the learning rate to about 2e-05 (now 1)",
        "clip the gradient norm at 1.5 (the median)",
        "set Adam's epsilon to about 2e-12 (now 1e-08)",
    ):
        action = understood(text)
        assert action is not None
        assert action.change is not None
        action.change(setup)
    assert (setup.rate, setup.clip, setup.epsilon) == (2e-5, 1.5, 2e-12)
    words = understood("hand them to the optimizer: build it from all of the model's parameters, or add a group")
    assert words is not None
    assert words.cures == ("optimizer",)
    paired, mixed = understood("check that labels follow their inputs: shuffle both together"), understood("shuffle the data")
    assert paired is not None
    assert mixed is not None
    assert (paired.cures, mixed.cures) == (("labels",), ("shuffle",))
    assigned = understood("look at where the weight is loaded or assigned")
    assert assigned is not None
    assert assigned.cures == ("initialisation",)
    assert understood("choose a stable design") is None
    assert understood("train on ten samples until they are learnt by heart") is None


def test_an_interrupted_run_is_gone_on_with_and_can_be_written(tmp_path: Path):
    rows = tmp_path / "rows"
    rows.write_text(json.dumps(HEALTHY) + "\n" + json.dumps(row("rate", finding("WT104"), score=0.1))[:-9], encoding="utf-8")
    assert known(rows) == [HEALTHY]
    work([Job("loop", "a", "", 0)], rows, 1, 60.0)  # it is there: nothing is built
    work([Job("loop", "unknown", "", 0)], rows, 1, 0.0)  # the time is up: nothing is started
    assert known(rows) == [HEALTHY]
    text = markdown(known(rows), "command", 2)
    assert "2 runs were planned, 1 of them were made before the time was up." in text
    assert "| healthy runs | 1 | 1 |" in text


def test_faults_come_after_their_healthy_twins_and_all_of_them_once_before_any_twice():
    plan = {name: {"frameworks": ["lightning", "loop"], "faults": ["rate", "other"] if name != "c" else ["rate"]} for name in "abc"}
    jobs = choose(plan, ["lightning", "loop"], [0, 1], 2, healthy_only=False, alternate=True)
    healthy, faulty = ([job for job in jobs if bool(job.operator) == wanted] for wanted in (False, True))
    assert {(job.recipe, job.seed, job.framework) for job in healthy} == {
        *(("a", 0, "lightning"), ("b", 0, "loop"), ("c", 0, "lightning")),
        *(("a", 1, "loop"), ("b", 1, "lightning"), ("c", 1, "loop")),
    }
    assert [job.operator for job in faulty] == ["rate", "other", "rate", "other"]
    assert len({(job.operator, job.recipe) for job in faulty}) == 4
    assert all(jobs.index(Job(job.framework, job.recipe, "", job.seed)) < jobs.index(job) for job in faulty)
    assert len(set(jobs)) == len(jobs) == 10
    assert sum(bool(job.operator) for job in jobs[:5]) == 2  # half of the way: half of each
    many = choose(plan, ["lightning", "loop"], [0, 1], 9, healthy_only=False, alternate=True)
    assert len(set(many)) == len(many) == 6 + 6 + 4  # every recipe with every seed, and no more
    quick = choose(plan, ["lightning", "loop"], [0, 1], 9, healthy_only=False, alternate=True, slow="a|b")
    assert {(job.operator, job.recipe) for job in quick if job.operator} == {("rate", "c")}
    both = choose(plan, ["lightning", "loop"], [0], 1, healthy_only=False, alternate=False)
    assert sorted(job.framework for job in both if job.operator) == ["lightning", "lightning", "loop", "loop"]


TRIED = {
    "torch": ("mlp-digits", "mlp-diabetes", "cnn-digits", "cnn-digits-epoch-schedule", "mlp-wine-tanh", "gru-authors", "label-smoothing-digits"),
    "keras": ("mlp-digits", "diabetes", "batch-norm-cnn-digits", "wine-tanh", "text-convolutions-authors", "cnn-digits"),
}


def state(setup: Setup) -> list[Any]:
    """Everything a fault may change, in a comparable form."""
    keras = hasattr(setup.model, "_flatten_layers")
    values = [value.numpy() for value in setup.model.weights] if keras else [value.numpy() for value in setup.model.state_dict().values()]
    flags = [value.trainable for value in setup.model.weights] if keras else [value.requires_grad for value in setup.model.parameters()]
    parts = (
        [(layer.activation, getattr(layer, "momentum", 0)) for layer in setup.model._flatten_layers() if hasattr(layer, "activation")]
        if keras
        else []
    )
    parts += [layer.momentum for layer in setup.model._flatten_layers() if hasattr(layer, "momentum")] if keras else []
    parts += [type(layer) for layer in setup.model._flatten_layers()] if keras else []
    parts += [] if keras else [getattr(module, "momentum", type(module)) for module in setup.model.modules()]
    data = [(value.shape, value.tobytes()) for value in (*setup.x, *setup.val_x, setup.y, setup.val_y, *values)]
    fields = {name: value for name, value in vars(setup).items() if name not in ("model", "x", "y", "val_x", "val_y", "mark", "start")}
    return [data, flags, parts, fields]


def check(side: str) -> None:
    """In a process of its own: each fault applies to one of the recipes tried, changes it, and leaves it alone elsewhere."""
    from benchmarks.detection import operators
    from benchmarks.detection.run import Job, build

    jobs = [Job("keras" if side == "keras" else "loop", recipe, "", 0) for recipe in TRIED[side]]
    known = [build(job) for job in jobs]
    for name, fault in operators.of(side).items():
        setup = build(jobs[next(index for index, setup in enumerate(known) if fault.applies(setup))])
        before = state(setup)
        again = state(setup)
        assert before == again, f"{name}: looking changes it"
        fault.put(setup)
        assert state(setup) != before, f"{name} changes nothing"
        assert fault.about or setup.mark, f"{name} has no right place"
    print(f"{len(operators.of(side))} faults")


@pytest.mark.parametrize(("side", "modules"), [("torch", ("torch", "lightning", "sklearn")), ("keras", ("keras", "tensorflow", "sklearn"))])
def test_each_fault_changes_what_it_says(side: str, modules: tuple[str, ...], tmp_path: Path):
    needs(*modules)
    code = f"from tests.examples.test_detection import check; check({side!r})"
    assert int(run("-c", code, cwd=tmp_path).split()[-2]) >= 25


def test_every_right_code_is_one_of_the_catalogue_or_of_its_plan():
    known = {*catalogue(), *CONSEQUENCES, *(code for codes in CONSEQUENCES.values() for code in codes)}
    assert {code for fault in SHARED.values() for code in fault.codes} - known == set()

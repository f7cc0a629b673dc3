"""Laws that hold for every rule of the catalogue."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.series import plan, well_worded
from trainvet.finding import Severity
from trainvet.rule import SECTIONS, Rule, build, catalogue, defect, explain, resolve
from trainvet.statistics import MEANING, SERIES_TARGETS, Facts, Loss, Snapshot, Table, Track

HERE = Path(__file__).parent
RULES = [pytest.param(kind, id=code) for code, kind in catalogue().items()]
FAMILIES = {"NF", "LO", "GR", "WT", "LR", "LS", "AC", "MO", "IN", "FT", "RN", "PF"}
LINES = 180
EVERY_STEP = tuple(f"{target}." for target in SERIES_TARGETS)
every = pytest.mark.parametrize("kind", RULES)


def file_of(kind: type[Rule]) -> Path:
    return Path(inspect.getfile(kind))


def numbers(kind: type[Rule]) -> list[dataclasses.Field]:
    return [
        field for field in dataclasses.fields(kind) if field.init and isinstance(field.default, int | float) and not isinstance(field.default, bool)
    ]


def test_there_are_rules():
    assert len(RULES) >= 20


@every
def test_code_name_file_and_test_agree(kind):
    assert re.fullmatch(r"[A-Z]{2}\d{3}", kind.code)
    assert kind.code[:2] in FAMILIES
    stem = file_of(kind).stem
    assert stem == defect(kind).replace("-", "_")
    assert kind.__name__ == stem.title().replace("_", "")
    assert (HERE / f"test_{stem}.py").is_file()
    assert kind.code in (HERE / f"test_{stem}.py").read_text() or "import" in (HERE / f"test_{stem}.py").read_text()


@every
def test_one_rule_a_file_of_bounded_length(kind):
    module = sys.modules[kind.__module__]
    assert [item for item in vars(module).values() if inspect.isclass(item) and issubclass(item, Rule) and item.__module__ == module.__name__] == [
        kind
    ]
    assert len(file_of(kind).read_text().splitlines()) <= LINES
    assert (module.__doc__ or "").startswith(f"{kind.code}: ")


@every
def test_the_docstring_is_the_page(kind):
    page = inspect.cleandoc(kind.__doc__ or "")
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    assert parts[0].strip() == ""
    assert tuple(parts[1::2]) == SECTIONS
    assert all(len(text.strip()) > 20 and text.strip().endswith(".") for text in parts[2::2])
    for setting in re.findall(r"``(\w+)``", page):
        assert setting in {field.name for field in dataclasses.fields(kind)} | {"ignore"} or not setting.islower(), f"{setting} is no setting"


@every
def test_the_page_can_be_printed(kind):
    page = explain(kind)
    assert page.startswith(f"# {kind.code} {defect(kind)}\n")
    for text in (
        *kind.causes,
        *kind.fixes,
        *(f"`{field.name}` = {field.default!r}" for field in dataclasses.fields(kind) if field.init),
        *kind.reads,
    ):
        assert text in page


@every
def test_what_it_declares(kind):
    assert kind.reads <= MEANING.keys()
    assert isinstance(kind.severity, Severity)
    assert kind.trust in ("stable", "preview")
    assert re.fullmatch(r"\d+\.\d+", kind.since)
    assert kind.causes
    assert kind.fixes
    for text in (*kind.causes, *kind.fixes):
        assert not text.endswith("."), text
        assert not text[:1].isupper() or text[1:2].isupper() or text.split()[0] in ("Adam",), text


@every
def test_it_is_a_dataclass_whose_settings_have_defaults(kind):
    assert dataclasses.is_dataclass(kind)
    rule = build(kind, {})
    assert rule == kind()
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(kind) if field.init)
    rule.validate()


@every
def test_impossible_settings_are_refused(kind):
    for field in numbers(kind):
        for value in (-1, -0.5, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=field.name):
                build(kind, {field.name: value})
        with pytest.raises(ValueError, match=field.name):
            build(kind, {field.name: "much"})
        with pytest.raises(ValueError, match=rf"did you mean .*{field.name}"):
            build(kind, {field.name + "x": 1})
    with pytest.raises(ValueError, match="has no setting"):
        build(kind, {"zzz": 1})


@every
def test_a_misspelt_name_is_answered_with_the_right_one(kind):
    name = defect(kind)
    for wrong in {name[:-1], name.replace("-", "--", 1), name[0] + name[2:]} - {name}:
        with pytest.raises(ValueError, match=rf"unknown rule .* did you mean .*{name}"):
            resolve(wrong)
    with pytest.raises(ValueError, match=rf"did you mean .*{kind.code[:2]}\d"):
        resolve(kind.code[:2] + "998")


@every
def test_it_imports_the_core_only_and_no_other_rule(kind):
    tree = ast.parse(file_of(kind).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [item.name for node in ast.walk(tree) if isinstance(node, ast.Import) for item in node.names]
    for name in names:
        root = name.split(".")[0]
        assert root in ("numpy", "trainvet") or root in sys.stdlib_module_names, name
        assert not name.startswith(("trainvet.rules", "trainvet.callbacks", "trainvet.integrations", "trainvet.monitor")), name


@every
def test_a_fresh_state_is_plain_and_goes_round(kind):
    rule, other = kind(), kind()
    list(rule.begin(Facts()))
    state = json.loads(json.dumps(rule.state_dict()))
    other.load_state_dict(state)
    assert json.loads(json.dumps(other.state_dict())) == state


@every
def test_rules_share_no_history(kind):
    first, second = kind(), kind()
    before = json.dumps(second.state_dict())
    for snapshot in anything(first, 1.0):
        list(first.check(snapshot))
    assert json.dumps(second.state_dict()) == before


@every
def test_nothing_measured_is_nothing_found(kind):
    rule = kind()
    assert list(rule.begin(Facts())) == []
    assert list(rule.begin(Facts())) == []
    assert list(rule.check(Snapshot(0, 1))) == []
    assert list(rule.end(1)) == []
    text = rule.missing()
    assert text == text.strip()
    assert not text.endswith(".")


PLAN = plan(
    {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "c.weight": (4, 4), "d.weight": (4, 4)},
    planned_steps=400,
    losses=(Loss("loss", "cross_entropy", 10, 64),),
    loss_scaler=True,
)


def anything(rule: Rule, value: float, length: int = 260) -> list[Snapshot]:
    """A run in which everything the rule reads has one value."""
    out = []
    for step in range(0, length, 10):
        steps = np.arange(step, step + 10)
        rows = {
            key: {"loss" if key == "loss.value" else "group 0": Track(steps, steps + 1, np.full(10, value))}
            for key in rule.reads
            if key.startswith(EVERY_STEP)
        }
        tables: dict[str, Table] = {}
        for key in rule.reads:
            target, statistic = key.split(".")
            if not key.startswith(EVERY_STEP):
                names = tuple(PLAN.parameters) if target in ("gradient", "weight", "update") else (target,)
                columns = dict(tables[target].columns) if target in tables else {}
                size = value if np.isfinite(value) or statistic not in ("nan", "inf", "nonfinite") else 1.0  # counts are finite
                tables[target] = Table(names, columns | {statistic: np.full(len(names), size)})
        out.append(Snapshot(step + 9, step + 10, step + 9, 0, tables, rows))
    return out


@every
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-300, 3e38, 1e5])
def test_no_number_makes_it_fail(kind, value):
    """Extreme numbers may be found to be anything; the rule must not raise, finite ones must not make numpy warn, and its words stay in order."""
    rule = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if np.isfinite(value) else "ignore")
        found = list(rule.begin(PLAN))
        for snapshot in anything(rule, value):
            found += rule.check(snapshot)
        found += rule.end(260)
    for finding in found:
        well_worded(finding)
        assert finding.code == kind.code
    json.dumps(rule.state_dict())

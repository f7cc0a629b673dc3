from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from tests.series import snapshots
from trainvet.rule import PerSubject, Rows, Rule, Streak, build, catalogue, defect, explain, matches, resolve, split_place
from trainvet.rules.dead_relu import DeadRelu

# ---- PerSubject


def test_numbers_follow_their_subjects_when_the_plan_changes():
    kept = PerSubject(count=0.0, first=-1.0)
    rows = kept.rows(("a", "b", "c"))
    kept["count"][rows] = [1, 2, 3]
    rows = kept.rows(("c", "new", "a"))
    assert kept["count"][rows].tolist() == [3, 0, 1]
    assert kept["first"][rows].tolist() == [-1, -1, -1]
    kept["count"][rows] = [30, 40, 10]
    assert kept["count"][kept.rows(("a", "b", "c", "new"))].tolist() == [10, 2, 30, 40]


def test_the_same_names_are_looked_up_once():
    kept = PerSubject(count=0.0)
    names = tuple("abc")
    kept.rows(names)
    assert kept.rows(names) == slice(None)
    assert kept.rows(("a", "b")).tolist() == [0, 1]


def test_per_subject_state_is_json():
    kept, other = PerSubject(count=0.0), PerSubject(count=0.0)
    rows = kept.rows(("a", "b"))
    kept["count"][rows] = [1.5, np.nan]
    other.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    rows = other.rows(("b", "a"))
    np.testing.assert_array_equal(other["count"][rows], [np.nan, 1.5])
    rows = other.rows(("z",))
    assert other["count"][rows].tolist() == [0]


# ---- Streak


def due(streak, *samples, names=("a",), clear=None):
    """The samples at which ("a", ...) come due; a sample is a string of 1 and 0, one per name."""
    told = []
    for step, sample in enumerate(samples):
        cleared = None if clear is None else np.array([mark == "1" for mark in clear[step]])
        rows = streak.update(names, np.array([mark == "1" for mark in sample]), step, cleared)
        told += [(step, names[row]) for row in rows]
    return told


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_due_once_when_the_patience_is_reached(patience):
    streak = Streak(patience)
    assert due(streak, *"1" * 12) == [(patience - 1, "a")]
    assert streak.first("a") == 0
    assert streak.longest() == 12


def test_due_again_after_it_was_clear():
    assert due(Streak(2), *"11100110111") == [(1, "a"), (6, "a"), (9, "a")]


def test_a_gap_starts_the_count_anew():
    streak = Streak(3)
    assert due(streak, *"1101101110") == [(8, "a")]
    assert streak.first("a") == 6
    assert streak.longest() == 0


def test_rearming_can_ask_for_more_than_not_holding():
    assert due(Streak(2), *"11011011", clear="00000100") == [(1, "a"), (7, "a")]


def test_subjects_are_counted_apart():
    assert due(Streak(2), "10", "11", "01", names=("a", "b")) == [(1, "a"), (2, "b")]


def test_a_subject_that_is_left_out_keeps_its_count():
    streak = Streak(3)
    assert due(streak, "11", "11", names=("a", "b")) == []
    assert streak.update(("b",), np.array([True]), 2) == [0]
    assert streak.update(("a",), np.array([True]), 9) == [0]
    assert streak.first("a") == 0


def test_subjects_may_join_and_change_their_order():
    streak = Streak(2)
    streak.update(("a", "b"), np.array([True, False]), 0)
    assert streak.update(("new", "b", "a"), np.array([True, True, True]), 1) == [2]
    assert streak.first("new") == 1
    assert streak.first("never seen") == -1


def test_streak_state_is_json():
    streak, other = Streak(3), Streak(3)
    due(streak, "1", "1")
    other.load_state_dict(json.loads(json.dumps(streak.state_dict())))
    assert other.update(("a",), np.array([True]), 2) == [0]
    again = Streak(3)
    again.load_state_dict(other.state_dict())
    assert again.update(("a",), np.array([True]), 3) == [], "told before it was saved"


# ---- Rows


def test_rows_follow_choice_and_plan():
    rows = Rows()
    rows.choose(["b", "d"])
    first, second = (snapshots(None, {"gradient.rms": item})[0] for item in ({"a": "1", "b": "2", "d": "4"}, {"d": "40", "b": "20"}))
    for snapshot, names, values in ((first, ("b", "d"), [2, 4]), (second, ("d", "b"), [40, 20])):
        assert rows.find(snapshot.column("gradient.rms")[0])
        assert (rows.names, rows.values(snapshot, "gradient.rms").tolist()) == (names, values)
    assert np.isnan(rows.values(second, "weight.rms")).all()
    rows.choose(["nothing"])
    assert not rows.find(second.column("gradient.rms")[0])


def test_values_of_another_tables_names():
    snapshot = snapshots(None, {"gradient.rms": {"a": "1", "b": "2"}, "weight.rms": {"b": "20", "a": "10"}})[0]
    assert snapshot.values("weight.rms", ("a", "b")).tolist() == [10, 20]
    assert np.isnan(snapshot.values("weight.rms", ("c",))).tolist() == [True]


# ---- names, settings, pages


def test_a_rule_is_named_after_its_file_and_an_own_one_after_its_class():
    @dataclasses.dataclass
    class TooManyZeros(Rule):
        code = "XX001"

    assert defect(DeadRelu) == DeadRelu().name == "dead-relu"
    assert TooManyZeros().name == "too-many-zeros"


def test_the_catalogue_is_found_not_listed():
    rules = catalogue()
    assert rules["AC101"] is DeadRelu
    assert list(rules) == sorted(rules)


def test_resolve():
    assert resolve("AC101") == resolve("ac101") == resolve("dead-relu") == resolve("Dead_Relu") == [DeadRelu]
    assert DeadRelu in resolve("AC")
    assert DeadRelu in resolve("default")
    assert set(resolve("all")) == set(catalogue().values())


@pytest.mark.parametrize(
    ("where", "subject", "fits"),
    [
        ("encoder", "encoder.0.weight", True),
        ("encoder.*", "encoder.0.weight", True),
        ("encoder.0", "encoder.0.weight", True),
        ("enc", "encoder.0.weight", False),
        ("*.weight", "encoder.0.weight", True),
        ("*", "loss", True),
        ("weight", "encoder.0.weight", False),
    ],
)
def test_places(where, subject, fits):
    assert matches(where, subject) is fits


def test_split_place():
    assert split_place("dead-relu@encoder.*") == ("dead-relu", "encoder.*")
    assert split_place("GR") == ("GR", "")


def test_build_checks_what_a_rule_reads():
    @dataclasses.dataclass
    class Misled(Rule):
        code = "XX002"
        reads = frozenset({"gradient.nrom"})

    with pytest.raises(ValueError, match=r"misled reads the unknown statistic 'gradient\.nrom'; did you mean gradient\.norm"):
        build(Misled, {})


def test_a_switch_takes_no_number_and_no_text():
    @dataclasses.dataclass
    class Switch(Rule):
        code = "XX003"
        strict: bool = False

    assert build(Switch, {"strict": True}).strict is True
    for value in (1, "yes", 0.0):
        with pytest.raises(ValueError, match="must be of the same kind"):
            build(Switch, {"strict": value})


def test_the_page_holds_docstring_settings_causes_fixes_and_reads():
    page = explain(DeadRelu)
    for text in ("# AC101 dead-relu", "## What it checks", "- `share` = 0.5", "## Likely causes", "## What to try", "`activation.dead_share`"):
        assert text in page

from __future__ import annotations

import dataclasses
import random

import pytest

from trainvet.cause import CONSEQUENCES, explains, first, order
from trainvet.finding import Finding, Severity


def finding(code, step, first_step=None, severity=Severity.WARNING, subject="a", name=""):
    return Finding(code, name or code.lower(), severity, step, step if first_step is None else first_step, "text", (subject,))


def tree(found, depth=None):
    """[(code of a headline, [codes folded under it])]."""
    return [(head.code, [item.code for item in head.consequences]) for head in order(found, depth)]


def test_what_a_cause_brings_about_is_folded_under_it():
    assert tree([finding("LO104", 200, 100), finding("WT106", 150, 50), finding("AC101", 40, 0)]) == [("AC101", ["WT106", "LO104"])]


def test_a_prefix_stands_for_a_family():
    assert tree([finding("NF101", 10), finding("LO101", 40), finding("GR103", 50), finding("IN102", 60)]) == [
        ("NF101", ["LO101", "GR103"]),
        ("IN102", []),
    ]


def test_a_cause_that_began_later_explains_nothing():
    assert tree([finding("WT106", 50, 0), finding("AC101", 60, 20)]) == [("WT106", []), ("AC101", [])]


def test_a_cause_that_is_found_later_but_began_earlier_is_the_headline():
    assert tree([finding("WT106", 50, 20), finding("AC101", 60, 0)]) == [("AC101", ["WT106"])]


def test_a_run_that_does_not_learn_is_explained_by_a_fault_that_began_meanwhile():
    assert tree([finding("LO104", 199, 0), finding("AC101", 169, 80)]) == [("AC101", ["LO104"])]
    assert tree([finding("LO104", 199, 0), finding("AC101", 260, 240)]) == [("LO104", []), ("AC101", [])]


@pytest.mark.parametrize("code", ["AC101", "WT107"])
def test_units_that_never_fire_explain_zeros_but_no_cut(code):
    zeros, cut = ({"without gradient": count, "only zeros": 5 - count} for count in (0, 2))
    missing = finding("GR104", 9, 0)
    assert tree([finding(code, 4, 0), dataclasses.replace(missing, evidence=zeros)]) == [(code, ["GR104"])]
    assert tree([finding(code, 4, 0), dataclasses.replace(missing, evidence=cut)]) == [(code, []), ("GR104", [])]


def test_information_explains_nothing_and_comes_last():
    found = [finding("AC101", 5, severity=Severity.INFO), finding("WT106", 50)]
    assert tree(found) == [("WT106", []), ("AC101", [])]


def test_a_warning_does_not_explain_a_nan_away():
    """A first update that was a little large, and ten steps later the log of 0 while the loss was falling."""
    assert tree([finding("WT104", 0), finding("NF101", 10)]) == [("WT104", []), ("NF101", [])]
    assert tree([finding("WT104", 0, severity=Severity.ERROR), finding("NF101", 10)]) == [("WT104", ["NF101"])]


def test_the_consequences_of_a_consequence_are_folded_too():
    """Raw targets are a warning, which would not explain a NaN; the gradient that explodes because of them does."""
    found = [finding("IN109", 0), finding("GR101", 5, severity=Severity.ERROR), finding("NF101", 20, severity=Severity.ERROR)]
    assert tree(found) == [("IN109", ["GR101", "NF101"])]
    assert tree([found[0], found[2]]) == [("IN109", []), ("NF101", [])]


def test_a_cause_of_a_part_stands_under_the_whole():
    whole = dataclasses.replace(finding("GR104", 9, 0), subjects=("a", "b"))
    assert tree([whole, dataclasses.replace(finding("GR108", 9, 0), subjects=("b",))]) == [("GR104", ["GR108"])]
    assert tree([whole, dataclasses.replace(finding("GR108", 9, 0), subjects=("a", "b"))]) == [("GR108", ["GR104"])]


def test_any_fault_may_be_behind_a_run_that_learns_badly():
    assert tree([finding("MO107", 9, 0), finding("LO107", 499, 0), finding("FT105", 900)]) == [("MO107", ["LO107", "FT105"])]
    assert tree([finding("RN103", 9, 0), finding("LO107", 499, 0)]) == [("RN103", []), ("LO107", [])]
    assert tree([finding("FT101", 9, 0), finding("FT105", 900)]) == [("FT101", ["FT105"])]


def test_what_the_data_and_the_wiring_are_comes_before_what_the_numbers_show():
    codes = ["WT104", "GR101", "LO101", "AC101", "LO108", "IN103", "LO110"]
    assert tree([finding(code, 9, 0, Severity.ERROR) for code in codes])[0][0] == "IN103"
    assert len(tree([finding(code, 9, 0, Severity.ERROR) for code in codes])) == 1


def test_unrelated_findings_are_headlines_in_the_order_of_time():
    assert tree([finding("IN104", 30), finding("LR102", 0), finding("MO104", 10)]) == [("LR102", []), ("MO104", []), ("IN104", [])]


def test_at_the_same_step_the_table_decides_then_the_forward_pass():
    assert [code for code, _ in tree([finding("WT105", 5), finding("WT102", 5), finding("IN102", 5)])] == ["WT102", "IN102"]
    late, early = finding("AC103", 5, subject="late"), finding("AC103", 5, subject="early", name="other")
    assert [head.subjects[0] for head in order([late, early], {"late": 7, "early": 2})] == ["early", "late"]


def test_a_gradient_that_explodes_before_the_first_update_explains_the_loss_and_the_update_of_that_step():
    assert tree([finding("LO108", 3, 0), finding("WT104", 0), finding("GR101", 119, 0)]) == [("GR101", ["LO108", "WT104"])]
    assert tree([finding("WT104", 0), finding("GR101", 119, 2)]) == [("WT104", ["GR101"])]


def test_weights_on_a_wrong_scale_come_before_the_loss_they_start_with():
    assert tree([finding("LO108", 9, 0), finding("WT108", 10, 0)]) == [("WT108", ["LO108"])]


def test_a_schedule_that_vanishes_explains_weights_that_stand_still():
    assert tree([finding("WT101", 80, 40, Severity.ERROR), finding("LR102", 0)]) == [("LR102", ["WT101"])]


def test_the_order_does_not_depend_on_the_order_of_arrival():
    found = [finding(code, step, step // 2) for step, code in enumerate(["NF101", "WT102", "GR104", "AC101", "WT106", "LO104", "IN102", "WT104"])]
    expected = tree(found)
    for seed in range(20):
        random.Random(seed).shuffle(found)
        assert tree(found) == expected


def test_a_repeated_finding_is_folded_and_raises_the_severity():
    found = [finding("AC101", 5), finding("AC101", 50, severity=Severity.ERROR, subject="b"), finding("AC101", 90, subject="c")]
    (head,) = order(found)
    assert (head.step, head.severity, len(head.consequences)) == (5, Severity.ERROR, 2)
    (head,) = order([finding("AC101", 5, severity=Severity.INFO), finding("AC101", 9)])
    assert (head.step, head.severity) == (9, Severity.WARNING)


def test_two_watchpoints_are_two_things():
    assert len(order([finding("WP100", 5, name="loss-limit"), finding("WP100", 9, name="norm-limit")])) == 2
    assert len(order([finding("WP100", 5, name="loss-limit"), finding("WP100", 9, name="loss-limit")])) == 1


def test_adding_a_finding_keeps_earlier_headlines_where_it_began_later():
    found = [finding("WT102", 0), finding("IN102", 10)]
    before = [code for code, _ in tree(found)]
    assert [code for code, _ in tree([*found, finding("LO105", 500)])][:2] == before


def test_the_first_headline_of_at_least_a_warning():
    assert first(order([finding("IN104", 1, severity=Severity.INFO), finding("LR102", 9)])).code == "LR102"
    assert first([finding("IN104", 1, severity=Severity.INFO)]) is None


@pytest.mark.parametrize("code", CONSEQUENCES)
def test_no_rule_brings_about_itself(code):
    effect = finding(code, 5, name="another")
    assert not explains(finding(code, 5), effect)


def test_no_finding_is_lost():
    codes = [*CONSEQUENCES, "IN101", "FT101", "LS103", "WP100"]
    found = [finding(random.Random(step).choice(codes), step, step // 3, random.Random(step).choice(list(Severity)), str(step)) for step in range(60)]
    heads = order(found)
    assert sorted(item.subjects[0] for head in heads for item in (head, *head.consequences)) == sorted(item.subjects[0] for item in found)

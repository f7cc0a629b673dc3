from __future__ import annotations

import re

import pytest

from trainvet.rule import catalogue
from trainvet.symptom import SYMPTOMS, find, page


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("my loss is NaN", "IN101"),
        ("loss becomes inf after a while", "IN101"),
        ("my loss does not fall", "WT102"),
        ("the network doesn't learn", "WT102"),
        ("loss spikes", "IN103"),
        ("validation is bad", "MO104"),
        ("it predicts the same class", "LO110"),
        ("float16 underflow", "LS104"),
        ("it hangs", "RN102"),
    ],
)
def test_words_lead_to_a_symptom(asked, first):
    assert find(asked)[0].codes[0] == first


def test_what_is_not_known_is_answered_with_what_is():
    with pytest.raises(ValueError, match="my loss is NaN or infinite; my loss does not fall"):
        find("qwertz")


def test_every_rule_is_a_cause_of_something_or_says_how_a_run_went():
    named = {code for symptom in SYMPTOMS for code in symptom.codes}
    assert named <= catalogue().keys()
    advice = {"LO111", "LR104", "MO106", "MO107", "IN105", "IN108", "FT105"}  # no symptom of their own: told when the run shows them
    assert catalogue().keys() - named <= advice
    for symptom in SYMPTOMS:
        assert len(set(symptom.codes)) == len(symptom.codes)


def test_a_page_lists_the_rules_in_order_with_cause_and_fix():
    lines = [line for line in page(SYMPTOMS[0]) if re.match(r"\d+\. ", line)]
    assert [line.split("**")[1] for line in lines] == [kind.code for kind in SYMPTOMS[0].rules()]
    assert all("Try: " in line for line in lines)

from __future__ import annotations

import copy
import dataclasses

import pytest

from trainvet import Rule, Watchpoint
from trainvet.finding import Finding, Severity
from trainvet.rule import catalogue
from trainvet.selection import choose


def found(subjects=("encoder.0.weight", "head.weight"), code="AC101", name="dead-relu"):
    return Finding(code, name, Severity.WARNING, 5, 5, "text", tuple(subjects))


def family(prefix):
    return {code for code in catalogue() if code.startswith(prefix)}


def test_the_default_is_every_stable_rule():
    assert set(choose().rules) == {code for code, kind in catalogue().items() if kind.trust == "stable"}


@pytest.mark.parametrize(("select", "codes"), [(("AC101",), {"AC101"}), (("dead-relu",), {"AC101"}), (("dead_relu", "nf"), {"AC101", *family("NF")})])
def test_codes_names_and_prefixes(select, codes):
    assert set(choose(select).rules) == codes


def test_ignoring_a_rule_or_a_family():
    assert "AC101" not in choose(ignore=("dead-relu",)).rules
    assert not any(code.startswith("WT") for code in choose(ignore=("WT",)).rules)


def test_a_muted_place():
    selection = choose(ignore=("dead-relu@encoder.*",))
    assert selection.narrow(found()).subjects == ("head.weight",)
    assert selection.narrow(found()).where == "head.weight"
    assert selection.narrow(found(["encoder.0.weight"])) is None
    other = found(code="AC103", name="saturated-activation")
    assert selection.narrow(other) is other


def test_the_line_a_finding_offers_mutes_just_it():
    finding = found(["encoder.0.weight"])
    selection = choose(ignore=finding.mute)
    assert selection.narrow(finding) is None
    assert selection.narrow(found(["encoder.1.weight"])) is not None


def test_a_place_names_modules_too():
    for where, kept in (("encoder", ("head.weight",)), ("*.weight", None), ("enc", ("encoder.0.weight", "head.weight"))):
        narrowed = choose(ignore=(f"AC@{where}",)).narrow(found())
        assert (narrowed.subjects if narrowed else None) == kept


def test_a_rule_for_some_places_only():
    selection = choose(("dead-relu@encoder.*", "dead-relu@decoder.*"))
    assert set(selection.rules) == {"AC101"}
    assert selection.narrow(found()).subjects == ("encoder.0.weight",)
    assert selection.narrow(found(["head.weight"])) is None
    assert choose(("dead-relu@encoder.*", "AC")).narrow(found()).subjects == ("encoder.0.weight", "head.weight")


def test_a_finding_about_no_subject_is_known_by_its_place():
    whole = dataclasses.replace(found(()), where="optimizer 0")
    assert choose(ignore=("dead-relu@optimizer*",)).narrow(whole) is None
    assert choose().narrow(whole) is whole


def test_settings_reach_the_rule():
    selection = choose(settings={"dead-relu": {"share": 0.6}, "WT": {}})
    assert selection.rules["AC101"].share == 0.6
    assert choose(settings={"AC101": {"batches": 6.0}}).rules["AC101"].batches == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": ("dead-relo",)}, "unknown rule 'dead-relo'; did you mean dead-relu"),
        ({"ignore": ("AC999",)}, "unknown rule 'AC999'; did you mean AC101 or AC102 or AC103"),
        ({"select": ("zzzzzzzz",)}, "known rules: .*AC101"),
        ({"select": "dead-relu"}, r"must be a sequence of names, such as \(\"dead-relu\",\)"),
        ({"ignore": "dead-relu"}, "must be a sequence of names"),
        ({"settings": {"dead-relu": {"shares": 0.6}}}, "dead-relu has no setting 'shares'; did you mean share"),
        ({"settings": {"dead-relu": {"share": "much"}}}, "must be of the same kind as its default 0.5"),
        ({"settings": {"dead-relu": {"share": True}}}, "must be of the same kind"),
        ({"settings": {"dead-relu": {"share": -1}}}, "must be a finite number of at least 0"),
        ({"settings": {"dead-relu": {"share": float("nan")}}}, "must be a finite number"),
        ({"settings": {"dead-relu": {"batches": 2.5}}}, "must be a whole number"),
        ({"settings": {"dead-relu": {"batches": float("inf")}}}, "must be a whole number"),
        ({"settings": {"dead-relu": {"share": 0.6}}, "ignore": ("AC",)}, "settings are given for dead-relu, which is not selected"),
        ({"rules": ("dead-relu",)}, "must be Rule or Watchpoint objects"),
    ],
)
def test_bad_input_gets_a_clear_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose(**arguments)


# ---- rules of the user's own


def watch(name="", **limits):
    return Watchpoint("gradient.norm", name=name, **(limits or {"above": 1}))


def test_several_watchpoints_run_side_by_side_and_are_ignored_by_name():
    own = [watch("one"), watch("two"), watch("three")]
    assert len([rule for rule in choose(rules=own).rules.values() if rule.code == "WP100"]) == 3
    left = [rule.name for rule in choose(rules=own, ignore=("two",)).rules.values() if rule.code == "WP100"]
    assert left == ["one", "three"]


def test_a_place_of_one_watchpoint_is_muted_for_it_alone():
    selection = choose(rules=[watch("one"), watch("two")], ignore=("one@encoder",))
    assert selection.narrow(found(["encoder.w"], "WP100", "one")) is None
    assert selection.narrow(found(["encoder.w"], "WP100", "two")) is not None


def test_an_own_rule_is_validated():
    @dataclasses.dataclass
    class Odd(Rule):
        code = "XX001"
        limit: float = -1.0

    with pytest.raises(ValueError, match=r"odd: setting limit=-1\.0 must be a finite number"):
        choose(rules=[Odd()])
    assert "XX001" in choose(rules=[Odd(limit=1.0)]).rules


# ---- several callbacks


def test_merging_adds_what_the_other_has():
    selection = choose(("AC",))
    selection.merge(choose(("NF", "AC"), ignore=("dead-relu@head",)))
    assert set(selection.rules) == {*family("AC"), *family("NF")}
    assert selection.narrow(found()).subjects == ("encoder.0.weight",)


def test_a_rule_selected_for_places_and_for_all_is_for_all():
    for first, second in ((("AC101@encoder",), ("AC101",)), (("AC101",), ("AC101@encoder",))):
        selection = choose(first)
        selection.merge(choose(second))
        assert selection.narrow(found()).subjects == ("encoder.0.weight", "head.weight")
    selection = choose(("AC101@encoder",))
    selection.merge(choose(("AC101@head",)))
    assert selection.narrow(found()).subjects == ("encoder.0.weight", "head.weight")


def test_contradicting_settings_are_refused_and_equal_ones_are_not():
    selection = choose(settings={"dead-relu": {"share": 0.6}})
    selection.merge(choose(settings={"dead-relu": {"share": 0.6}}))
    with pytest.raises(ValueError, match="two callbacks give dead-relu different settings"):
        selection.merge(choose())


def test_watchpoints_of_two_callbacks_do_not_contradict():
    selection = choose(rules=[watch("one")])
    selection.merge(copy.deepcopy(choose(rules=[watch("two"), watch("three")])))
    assert sorted(rule.name for rule in selection.rules.values() if rule.code == "WP100") == ["one", "three", "two"]


def test_a_place_alone_mutes_every_rule_there():
    selection = choose(ignore=("@encoder",))
    assert selection.narrow(Finding("AC101", "dead-relu", Severity.ERROR, 1, 1, "text", ("encoder.0",))) is None
    assert selection.narrow(Finding("GR101", "exploding-gradient", Severity.ERROR, 1, 1, "text", ("head",))) is not None
    assert choose(**{key: value for key, value in selection.arguments().items() if key in ("select", "ignore")}).muted == selection.muted

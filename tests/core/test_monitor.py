from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.series import plan, snapshots
from trainvet import Rule, Watchpoint
from trainvet.action import Action
from trainvet.finding import Severity
from trainvet.monitor import Monitor
from trainvet.report import CHECKED, FAILED, MISSING, NO_DATA, UNOBSERVABLE, Report
from trainvet.selection import choose
from trainvet.statistics import Facts

PLAN = plan({"a.weight": (4, 4)})


@dataclasses.dataclass
class HighLoss(Rule):
    """Speaks at every loss above ``limit``, with the severity given by how far."""

    code = "LO900"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value"})
    causes, fixes = ("a cause",), ("a fix",)
    limit: float = 2.0

    def __post_init__(self) -> None:
        self.seen: list[int] = []

    def check(self, snapshot):
        for track in snapshot.tracks("loss.value").values():
            for step, value in zip(track.steps.tolist(), track.values, strict=True):
                self.seen.append(step)
                if value > self.limit:
                    severity = Severity.FATAL if value > 100 else Severity.ERROR if value > 10 else Severity.WARNING
                    yield self.finding(step, "the loss is high", subjects=("encoder.loss",), severity=severity, threshold="2")

    def missing(self):
        return "" if len(self.seen) >= 3 else f"{len(self.seen)} of 3 steps"

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


@dataclasses.dataclass
class Broken(Rule):
    """Raises in ``place`` from the third call on."""

    code = "XX900"
    reads: ClassVar[frozenset[str]] = frozenset({"loss.value"})
    place: str = "check"

    def __post_init__(self) -> None:
        self.calls = 0

    def _maybe(self, place: str) -> Any:
        if place == self.place:
            self.calls += 1
            if self.calls >= 3 or place != "check":
                raise RuntimeError(f"broken in {place}")

    def begin(self, facts):
        self._maybe("begin")
        return ()

    def check(self, snapshot):
        self._maybe("check")
        return ()

    def end(self, step):
        self._maybe("end")
        return ()

    def missing(self):
        self._maybe("missing")
        return ""

    def state_dict(self):
        self._maybe("state_dict")
        return {"calls": 1}

    def load_state_dict(self, state):
        self._maybe("load_state_dict")


class Sink:
    """Writes down what it was told; raises in ``fails``."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails = fails

    def _tell(self, what: str, value: Any = None) -> None:
        self.told.append((what, value))
        if what == self.fails:
            raise OSError("no space left on device")

    def start(self, step, environment):
        self._tell("start", step)

    def facts(self, step, facts):
        self._tell("facts", step)

    def write(self, snapshot, findings):
        self._tell("write", (snapshot.step, [finding.code for finding in findings]))

    def report(self, step, report):
        self._tell("report", report.verdict())

    def close(self):
        self._tell("close")


def monitor(*rules, select=("AC",), facts=PLAN, **how):
    made = Monitor(choose(select, rules=rules), **how)
    made.begin(facts)
    return made


def feed(made, loss, block=1, **columns):
    return [made.observe(snapshot) for snapshot in snapshots({"loss.value": loss}, columns or None, block=block)]


def told(made):
    return [(item.code, item.step) for item in made.report.findings]


def state(made, code):
    return next((item.state, item.detail) for item in made.report.coverage if item.code == code)


# ---- which rule sees what


def test_a_rule_is_shown_what_it_reads_and_nothing_else():
    rule = HighLoss()
    made = monitor(rule)
    made.observe(snapshots(None, {"gradient.norm": {"a.weight": "1"}})[0])
    assert rule.seen == []
    feed(made, "1 x3")
    assert rule.seen == [0, 1, 2]


def test_what_no_selected_rule_reads_is_not_wanted():
    made = monitor(HighLoss(), select=("AC103",), every=5)
    assert made.want(0) == {"loss.value", "activation.saturated_share"}
    for snapshot in snapshots({"loss.value": "1 x12"}, {"activation.saturated_share": {"act": "0 x10"}}, block=1):
        made.observe(snapshot)
    assert not made.due(12)
    assert made.want(12) == {"loss.value"}
    assert made.want(14) == {"loss.value", "activation.saturated_share"}


def test_what_cannot_be_observed_is_not_wanted_until_the_plan_says_otherwise():
    made = monitor(select=("AC103",), facts=dataclasses.replace(PLAN, unobservable={"activation": "the module is compiled"}))
    assert made.want(0) == frozenset()
    made.begin(PLAN)
    assert made.want(0) == {"activation.saturated_share"}


def test_rules_are_spared_what_follows_a_nan_but_nf101_is_not():
    rule = HighLoss()
    made = monitor(rule, select=("NF101",))
    feed(made, "1 x4, nan, 50 x4")
    assert rule.seen == [0, 1, 2, 3]
    assert told(made) == [("NF101", 4)]
    assert made.last_good_step == 3


def test_a_snapshot_that_is_emptied_by_a_skip_is_not_counted_as_a_check():
    made = monitor(select=("WT105",))
    skipped = snapshots({"run.skipped": "0 x2, 1"}, {"update.ratio": {"a.weight": "0.01 x3"}, "update.rms": {"a.weight": "0.01 x3"}})
    for snapshot in skipped:
        made.observe(snapshot)
    assert [item.checks for item in made.report.coverage] == [2]


def test_findings_from_the_plan_carry_its_step():
    made = monitor(select=("WT102",))
    assert told(made) == []
    late = plan({"a.weight": (4, 4), "b.weight": (4, 4)})
    made.begin(dataclasses.replace(late, optimizers=PLAN.optimizers), step=70)
    assert told(made) == [("WT102", 70)]


# ---- faults of ours


@pytest.mark.parametrize("place", ["begin", "check", "end", "missing", "state_dict", "load_state_dict"])
def test_a_rule_that_raises_is_switched_off_and_the_run_goes_on(place):
    other = HighLoss()
    made = monitor(Broken(place=place), other)
    made.load_state_dict({**made.state_dict(), "rules": {"XX900": {"calls": 0}}})
    feed(made, "1 x5, 3")
    report = made.end()
    assert told(made) == [("LO900", 5)]
    assert other.seen == [0, 1, 2, 3, 4, 5]
    assert state(made, "XX900") == (FAILED, f"RuntimeError('broken in {place}')")
    assert len([error for error in report.errors if "XX900 broken was switched off" in error]) == 1
    assert f"broken in {place}" in report.errors[0]
    assert "Traceback" in report.errors[0]


@pytest.mark.parametrize("fails", ["start", "facts", "write", "report", "close"])
def test_a_sink_that_raises_is_switched_off_and_the_others_go_on(fails):
    bad, good = Sink(fails), Sink()
    made = monitor(HighLoss(), sinks=(bad, good))
    feed(made, "1, 3, 1")
    made.end()
    assert [what for what, _ in bad.told].count(fails) == 1
    assert [value for what, value in good.told if what == "write"] == [(0, []), (1, ["LO900"]), (2, [])]
    assert good.told[-1] == ("close", None)
    assert len(made.report.errors) == 1
    assert "No space" in made.report.errors[0] or "no space left" in made.report.errors[0]


def test_on_finding_that_raises_is_switched_off():
    calls = []

    def pager(finding):
        calls.append(finding.step)
        raise ConnectionError("pager is down")

    made = monitor(HighLoss(), on_finding=pager)
    feed(made, "3, 1, 3")
    assert calls == [0]
    assert "on_finding raised" in made.report.errors[0]


def test_locating_that_fails_does_not_swallow_the_finding():
    made = monitor(select=("NF101",))
    made.locate = lambda finding: 1 / 0
    feed(made, "1, nan")
    assert told(made) == [("NF101", 1)]
    assert "locating" in made.report.errors[0]


# ---- telling


def test_the_place_of_a_nan_is_asked_for_once():
    made = monitor(select=("NF101",))
    asked = []

    def locate(finding):
        asked.append(finding.step)
        return dataclasses.replace(finding, subjects=("encoder",), where="encoder")

    made.locate = locate
    feed(made, "nan, 1 x30, nan, 1")
    assert asked == [0]
    (head,) = made.report.findings
    assert (head.where, [item.where for item in head.consequences]) == ("encoder", ["loss"])


def test_on_finding_is_called_once_for_each_new_headline():
    heads = []
    made = monitor(HighLoss(), select=("NF101",), on_finding=heads.append)
    feed(made, "1, 3, 3, 1 x30, nan, 1 x3")
    assert [(head.code, head.step) for head in heads] == [("LO900", 1), ("NF101", 33)]


def test_a_consequence_is_not_a_headline():
    heads = []
    made = monitor(select=("NF101", "AC103"), facts=Facts(framework="none"), on_finding=heads.append)
    feed(made, "nan, 1 x5", **{"weight.nan": {"a.weight": "1, 1, 1, 1, 1, 1"}})
    assert [(head.code, head.severity) for head in heads] == [("NF101", Severity.FATAL)]


def test_findings_are_stable_under_what_follows():
    first, longer = monitor(HighLoss()), monitor(HighLoss())
    feed(first, "1, 3, 1 x9")
    feed(longer, "1, 3, 1 x9, 50, 1 x9")
    assert [item.to_dict() for item in first.report.findings] == [
        dataclasses.replace(item, consequences=(), severity=Severity.WARNING).to_dict() for item in longer.report.findings
    ]


def test_sinks_hear_the_run_in_order():
    sink = Sink()
    made = monitor(HighLoss(), sinks=(sink,))
    feed(made, "1, 3")
    made.end()
    made.end("failed", "too late")
    assert [what for what, _ in sink.told] == ["start", "facts", "write", "write", "report", "report", "close"]
    assert (made.report.status, made.report.reason) == ("finished", "")


def test_a_run_that_failed_does_not_end_in_the_ordinary_way():
    made = monitor(Broken(place="end"), select=("AC101", "AC103"))
    assert made.end("failed", "CUDA out of memory").errors == ()
    assert made.report.verdict() == "trainvet: failed after 0 steps (0 applied). No warnings; 0 of 3 rules had the evidence to judge."


# ---- aborting


@pytest.mark.parametrize(
    ("abort_on", "step"),
    [(None, None), ("warning", 1), ("error", 2), ("fatal", 3), (("LO900",), 1), (("high-loss",), 1), (("AC101", "error"), 2), (("AC101",), None)],
)
def test_abort_by_level_code_or_name(abort_on, step):
    made = monitor(HighLoss(), abort_on=abort_on)
    actions = feed(made, "1, 3, 30, 300, 300")
    assert [index for index, action in enumerate(actions) if action is Action.ABORT] == ([step] if step is not None else [])
    assert (made.aborted_by.step if made.aborted_by else None) == step


def test_abort_by_the_name_of_one_watchpoint():
    from trainvet import Watchpoint

    both = [Watchpoint("loss.value", above=2, name="low"), Watchpoint("loss.value", above=20, name="high")]
    made = monitor(*both, abort_on=("high",))
    assert feed(made, "1, 3, 30").index(Action.ABORT) == 2


def test_what_is_muted_does_not_abort():
    made = Monitor(choose(("AC",), ignore=("high-loss@encoder",), rules=[HighLoss()]), abort_on="warning")
    made.begin(PLAN)
    assert set(feed(made, "3 x3")) == {Action.NOTHING}
    assert told(made) == []


def test_unknown_names_are_refused_at_construction():
    with pytest.raises(ValueError, match="unknown rule 'fatel'"):
        Monitor(choose(), abort_on="fatel")
    with pytest.raises(ValueError, match="unknown profile 'gann'; one of gan, rl, finetune"):
        Monitor(choose(), profile="gann")
    with pytest.raises(ValueError, match='every=0 must be "auto"'):
        Monitor(choose(), every=0)


# ---- profile


@pytest.mark.parametrize(
    ("given", "known", "severity"),
    [("gan", "", Severity.INFO), (None, "gan", Severity.INFO), (None, "", Severity.ERROR), ("finetune", "", Severity.ERROR)],
)
def test_a_profile_turns_its_rules_into_information(given, known, severity):
    made = monitor(HighLoss(), profile=given, facts=dataclasses.replace(PLAN, profile=known), abort_on="error")
    actions = feed(made, "1, 30")
    assert [item.severity for item in made.report.findings] == [severity]
    assert (Action.ABORT in actions) is (severity is Severity.ERROR)


# ---- coverage


def test_coverage_tells_what_was_checked_and_what_was_not():
    facts = dataclasses.replace(PLAN, unobservable={"activation": "the module is compiled"})
    made = monitor(HighLoss(), select=("AC101", "WT105", "WT102"), facts=facts)
    assert state(made, "LO900") == (NO_DATA, "")
    assert state(made, "AC101") == (UNOBSERVABLE, "the module is compiled")
    assert state(made, "WT105") == (NO_DATA, "")
    assert state(made, "WT102") == (CHECKED, "from the run's facts")
    feed(made, "1 x2")
    assert state(made, "LO900") == (MISSING, "2 of 3 steps")
    feed(made, "1 x5")
    assert state(made, "LO900") == (CHECKED, "")


def test_a_learning_rate_alone_is_no_evidence():
    facts = dataclasses.replace(PLAN, unobservable={"activation": "the module is compiled", "run.skipped": "no loss scaler in use"})
    made = monitor(select=("AC101", "WT105", "NF101"), facts=facts)
    for snapshot in snapshots({"optimizer.learning_rate": "0.1 x9"}):
        made.observe(snapshot)
    assert state(made, "AC101") == (UNOBSERVABLE, "the module is compiled")
    assert state(made, "WT105") == (NO_DATA, "")
    assert state(made, "NF101")[0] != CHECKED


def test_a_rule_about_facts_that_are_not_there_has_not_checked_anything():
    made = monitor(select=("WT102",), facts=dataclasses.replace(PLAN, optimizers=()))
    assert state(made, "WT102") == (MISSING, "no optimizer is known")


# ---- state


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped():
    loss = np.concatenate([np.ones(20), [3.0], np.ones(20), [30.0], np.ones(5), [np.nan], np.ones(4)])
    whole = monitor(HighLoss(), select=("NF101", "AC"))
    feed(whole, loss)
    first, second = (monitor(HighLoss(), select=("NF101", "AC")) for _ in range(2))
    many = snapshots({"loss.value": loss}, block=1)
    for snapshot in many[:30]:
        first.observe(snapshot)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.step, second.applied) == (30, 30)
    for snapshot in many[30:]:
        second.observe(snapshot)
    assert [item.to_dict() for item in second.report.findings] == [item.to_dict() for item in whole.report.findings]


def test_the_state_of_a_rule_that_is_no_longer_selected_is_left_out():
    saved = monitor(HighLoss(), select=("NF101",)).state_dict()
    made = monitor(select=("AC",))
    made.load_state_dict(saved)
    assert made.report.errors == ()


# ---- the rest


def test_notes_are_kept_once_and_history_is_at_hand():
    made = monitor(HighLoss())
    feed(made, "1, 2, 1")
    made.note("hooks do not run in a compiled module")
    made.note("hooks do not run in a compiled module")
    assert made.report.notes == ("hooks do not run in a compiled module",)
    assert made.history("loss.value").values[:, 0].tolist() == [1, 2, 1]
    made.own_seconds, made.run_seconds = 1.0, 50.0
    assert made.report.cost == {"seconds": 1.0, "share": 0.02}


def test_the_last_good_step_is_before_the_poison():
    made = monitor(select=("NF101",))
    feed(made, "1 x8, nan, nan, 1", block=4)
    assert made.last_good_step == 7
    bad = monitor(select=("NF101",))
    feed(bad, "nan, 1")
    assert bad.last_good_step is None


def test_the_report_lists_what_was_exempted():
    def watched(**arguments):
        rules = [Watchpoint("gradient.norm", above=1, name="large")]
        monitor = Monitor(choose(("LO",), rules=rules, **arguments))
        monitor.begin(Facts())
        for snapshot in snapshots(None, {"gradient.norm": {"a.b": "2", "c": "2"}}):
            monitor.observe(snapshot)
        return monitor.report

    assert watched().exempted == ()
    muted = watched(ignore=("large@a", "LO104"))
    assert muted.exempted == ("LO104 loss-not-decreasing was not run", "large@a: WP100 at a.b, c, step 0")
    assert muted.findings[0].subjects == ("c",)
    assert "exempted: large@a" in muted.to_text()
    assert watched(ignore=("@a", "@c")).findings == ()
    assert Report.from_dict(json.loads(muted.to_json())).exempted == muted.exempted

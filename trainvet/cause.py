"""Which finding is the headline and which are its consequences: first in time and furthest upstream first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from trainvet.finding import Finding, Severity

# a run that learns badly: any fault may be behind it
OUTCOMES = ("LO104", "LO105", "LO107", "LO111", "FT102", "FT105")
# values out of hand, and everything that goes with them
RUNAWAY = (
    "LO101",
    "LO102",
    "LO103",
    "LO106",
    "LO108",
    "GR101",
    "GR103",
    "GR107",
    "WT104",
    "WT105",
    "WT110",
    "AC",
    "NF101",
    "NF102",
    "LS101",
    "LS102",
)
# too little gets through
STANDSTILL = ("GR102", "GR104", "WT101", "WT106", "AC101", "AC102", "AC104", "AC105")

# cause -> findings it is known to bring about, besides the outcomes above; a code or a prefix of codes. At one and the same step the order of
# this table decides: what the data, the wiring and the settings are comes before what the numbers show.
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    # data
    "IN101": ("NF", "LO", "GR", "WT", "AC", "LS"),
    "IN111": ("NF", "LO", "GR101", "GR103"),
    "NF103": ("NF101", "LO", "GR", "WT", "AC", "FT"),
    "NF101": ("LO", "GR", "WT", "AC", "LS", "FT"),
    "IN103": (*RUNAWAY, *STANDSTILL, "LO109", "LO110"),
    "IN109": (*RUNAWAY, *STANDSTILL, "GR105"),
    # wiring
    "WT102": ("GR", "WT101", "WT105", "WT106", "LO108", "AC", "MO101", "MO103"),
    "MO101": ("GR104", "WT101", "WT106"),
    "GR108": ("GR104", "WT101", "WT106", "MO101", "MO103"),
    "MO103": ("GR104", "WT101"),
    "MO102": ("WT102",),
    "MO105": ("LO101", "LO102", "FT101"),
    "LO109": ("LO108", *STANDSTILL),
    "LO110": (*RUNAWAY, *STANDSTILL, "LO109"),
    "MO108": (*STANDSTILL, "LO101", "LO102", "LO108", "MO109", "FT", "GR103"),
    "MO104": ("MO109", "FT101", "FT103", "IN106", "AC105"),
    "MO107": (),
    "WT107": (*STANDSTILL, "LO108", "AC103"),
    # precision
    "LS104": ("LS", *STANDSTILL, "WT103", "NF101", "NF102"),
    "LS102": ("LS101", "LS103", *STANDSTILL, "GR101", "GR103"),
    "LS103": (*STANDSTILL, "WT103"),
    "LS101": ("WT106",),
    "WT103": ("WT101", "WT106"),
    # how the data look
    "IN102": (*RUNAWAY, *STANDSTILL, "WT108", "AC103"),
    "IN104": ("AC105", "FT101", "FT103", "IN105"),
    "IN105": ("LO101", "LO102", "LO103", "LO106", "GR103", "FT"),
    "IN106": ("FT101", "FT103", "FT105"),
    "IN107": ("FT101",),
    "IN110": ("FT101", "LO103", "LO106"),
    "MO109": ("FT101", "FT103", "FT105"),
    # settings
    "LR105": (*RUNAWAY, *STANDSTILL, "WT109"),
    "LR101": (*RUNAWAY, *STANDSTILL, "LR102"),
    "GR106": (*RUNAWAY, "GR105", "WT106"),
    "LR103": ("LO101", "LO102", "LO103", "GR101", "GR103", "WT105", "WT110", "AC", "NF101"),
    "LR102": ("WT101", "WT106", "LO102"),
    "GR105": ("WT106",),
    # what the numbers show
    "WT108": (*RUNAWAY, *STANDSTILL, "AC103"),
    "AC101": (*STANDSTILL, "GR105"),
    "GR104": ("WT101", "WT106", "GR102", "GR108"),
    "GR101": (*RUNAWAY, *STANDSTILL, "GR105"),
    "LO108": (),
    "WT104": (*RUNAWAY, *STANDSTILL, "LO106", "WT109"),
    "WT109": ("WT105", *STANDSTILL, "AC103"),
    "WT105": (*RUNAWAY, *STANDSTILL),
    "WT110": ("LO101", "LO102", "NF101", "NF102", "AC", "GR103"),
    "GR103": ("LO101", "LO102", "LO103", "NF101"),
    "AC107": ("LO101", "LO102", "NF101", "GR103"),
    "LO101": (*RUNAWAY, *STANDSTILL, "FT"),
    "AC103": ("GR102", "WT106"),
    "AC102": ("GR102", "GR104", "WT106", "AC104", "AC105"),
    "AC105": ("GR102", "GR104", "WT106", "WT101"),
    "AC104": ("GR102", "GR104", "WT106", "WT101", "AC105"),
    "NF102": ("NF101", "LS101", "LS102"),
    "GR102": ("WT106", "WT101"),
    "WT101": ("WT106",),
    "WT106": (),
    "FT101": ("FT105",),
    "LO104": ("LO105", "LO107", "FT102", "FT105"),
    "FT102": ("LO105", "FT105"),
    "LO107": ("LO105", "FT102", "FT105"),
    "LO105": ("FT105",),
}
# how fast a run is, how it can be repeated and how it does on other data says nothing about how well it learns; nor does the user's own limit
BY_THE_WAY = ("RN", "FT", "IN106", "IN112", "MO109", "MO110", "WP")
# evidence that, above 0, shows that an effect has a cause of its own: units that never fire pass zeros back, but they cut nothing off
OWN_CAUSE = {("AC101", "GR104"): "without gradient", ("WT107", "GR104"): "without gradient"}
# rules that judge the run as a whole: their first step is that of the stretch they judge, not that of a fault
WHOLE_RUN = frozenset(OUTCOMES)
# a cause that accounts for only a part of what the other one names stands under it
PART_OF = {"GR108": "GR104"}
RANK = {code: rank for rank, code in enumerate(CONSEQUENCES)}


def order(findings: Sequence[Finding], depth: Mapping[str, int] | None = None) -> list[Finding]:
    """Headlines, first cause first, each with its consequences folded under it.

    A finding B is a consequence of A when A, or what is folded under A already, may bring about B (the table above), is at least a warning,
    and began no later than B. A repeated finding of one rule is folded under its first one, which then speaks with the higher severity of the
    two. Ties are broken by ``depth`` (the place in the forward pass of a finding's first subject): upstream first.
    """
    place = depth or {}
    ranked = sorted(findings, key=lambda item: _key(item, place, findings))
    heads: list[Finding] = []
    folded: dict[int, list[Finding]] = {}
    for finding in ranked:
        for index, head in enumerate(heads):
            if any(explains(cause, finding) for cause in (head, *folded.get(index, []))):
                folded.setdefault(index, []).append(finding)
                break
        else:
            heads.append(finding)
    return [_with_consequences(head, folded.get(index, [])) for index, head in enumerate(heads)]


def explains(cause: Finding, effect: Finding) -> bool:
    """May ``cause`` have brought about ``effect``?"""
    if cause.code == effect.code and cause.name != effect.name:  # two watchpoints of the user's
        return False
    if cause.code == effect.code:
        return cause.severity >= Severity.WARNING or cause.severity >= effect.severity
    # a NaN has a place of its own; only what has gone badly wrong before explains it away
    enough = Severity.ERROR if effect.code == "NF101" else Severity.WARNING
    if cause.severity < enough or cause.first_step > began(effect):
        return False
    own = effect.evidence.get(OWN_CAUSE.get((cause.code, effect.code), ""), 0)
    if isinstance(own, int | float) and own > 0:
        return False
    if effect.code in OUTCOMES and cause.code not in OUTCOMES and not cause.code.startswith(BY_THE_WAY):
        return True
    return any(effect.code.startswith(prefix) for prefix in CONSEQUENCES.get(cause.code, ()))


def began(finding: Finding) -> int:
    """The step from which on the fault is known to be there."""
    return finding.step if finding.code in WHOLE_RUN else max(finding.first_step, 0)


def _with_consequences(head: Finding, folded: list[Finding]) -> Finding:
    worst = max((finding.severity for finding in folded if finding.name == head.name), default=head.severity)
    return dataclasses.replace(head, severity=max(head.severity, worst), consequences=tuple(folded))


def _rank(finding: Finding, findings: Sequence[Finding]) -> float:
    whole = PART_OF.get(finding.code, "")
    mine = set(finding.subjects)
    if any(other.code == whole and began(other) <= began(finding) and mine < set(other.subjects) for other in findings):
        return RANK[whole] + 0.5
    return RANK.get(finding.code, len(RANK))


def _key(finding: Finding, depth: Mapping[str, int], findings: Sequence[Finding]) -> tuple[int, int, float, int, int]:
    depths = [depth[subject] for subject in finding.subjects if depth.get(subject, -1) >= 0]
    return (
        0 if finding.severity >= Severity.WARNING else 1,
        began(finding),
        _rank(finding, findings),
        min(depths, default=1 << 30),
        finding.step,
    )


def first(findings: Iterable[Finding]) -> Finding | None:
    """The first headline of at least WARNING; None where there is none."""
    return next((finding for finding in findings if finding.severity >= Severity.WARNING), None)

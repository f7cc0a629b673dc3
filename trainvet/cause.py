"""Which finding is the headline and which are its consequences: first in time and furthest upstream first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from trainvet.finding import Finding, Severity

# cause -> findings it is known to bring about. A defect is folded under the first headline that explains it.
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "NF101": ("LO", "GR", "WT", "AC", "LS"),
    "WT102": ("GR", "WT101", "WT105", "WT106", "LO104", "LO108", "AC"),
    "WT107": ("GR102", "GR104", "WT106", "LO104", "LO108", "AC"),
    "AC101": ("GR102", "GR104", "WT106", "WT101", "LO104"),
    "GR104": ("WT101", "WT106", "LO104", "GR102"),
    "LR101": ("LO", "GR", "WT104", "WT105", "WT106", "WT101", "AC", "NF101"),
    "GR101": ("NF101", "LO", "WT104", "WT105", "WT106", "WT101", "GR102", "GR104", "AC"),
    "LO108": ("LO104",),
    "LR102": ("WT106", "LO104"),
    "LS102": ("LS101", "WT101", "WT106", "LO104", "GR"),
    "LS101": ("WT106", "LO104"),
    "WT104": ("NF101", "LO", "GR", "WT105", "WT106", "WT101", "AC"),
    "WT105": ("NF101", "LO", "GR", "WT106", "WT101", "AC"),
    "LO101": ("LO102", "LO104", "WT106", "GR102", "GR104", "AC"),
    "AC103": ("GR102", "WT106", "LO104"),
    "GR102": ("WT106", "WT101", "LO104"),
    "WT101": ("WT106", "LO104"),
    "WT106": ("LO104",),
}
# evidence that, above 0, shows that an effect has a cause of its own: units that never fire pass zeros back, but they cut nothing off
OWN_CAUSE = {("AC101", "GR104"): "without gradient", ("WT107", "GR104"): "without gradient"}
# rules that judge the run as a whole: their first step is that of the stretch they judge, not that of a fault
WHOLE_RUN = frozenset({"LO104"})
RANK = {code: rank for rank, code in enumerate(CONSEQUENCES)}


def order(findings: Sequence[Finding], depth: Mapping[str, int] | None = None) -> list[Finding]:
    """Headlines, first cause first, each with its consequences folded under it.

    A finding B is a consequence of A when A may bring about B (the table above), A is at least a warning, and A's condition began
    no later than B's. A repeated finding of one rule is folded under its first one, which then speaks with the higher severity of the
    two. Ties are broken by ``depth`` (the place in the forward pass of a finding's first subject): upstream first.
    """
    place = depth or {}
    ranked = sorted(findings, key=lambda item: _key(item, place))
    heads: list[Finding] = []
    folded: dict[int, list[Finding]] = {}
    for finding in ranked:
        for index, head in enumerate(heads):
            if explains(head, finding):
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
    return any(effect.code.startswith(prefix) for prefix in CONSEQUENCES.get(cause.code, ()))


def began(finding: Finding) -> int:
    """The step from which on the fault is known to be there."""
    return finding.step if finding.code in WHOLE_RUN else max(finding.first_step, 0)


def _with_consequences(head: Finding, folded: list[Finding]) -> Finding:
    worst = max((finding.severity for finding in folded if finding.name == head.name), default=head.severity)
    return dataclasses.replace(head, severity=max(head.severity, worst), consequences=tuple(folded))


def _key(finding: Finding, depth: Mapping[str, int]) -> tuple[int, int, int, int, int]:
    depths = [depth[subject] for subject in finding.subjects if depth.get(subject, -1) >= 0]
    return (
        0 if finding.severity >= Severity.WARNING else 1,
        began(finding),
        RANK.get(finding.code, len(RANK)),
        min(depths, default=1 << 30),
        finding.step,
    )


def first(findings: Iterable[Finding]) -> Finding | None:
    """The first headline of at least WARNING; None where there is none."""
    return next((finding for finding in findings if finding.severity >= Severity.WARNING), None)

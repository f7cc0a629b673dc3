"""What follows from a finding: nothing, or the end of the run."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainvet.finding import Finding, Severity
from trainvet.rule import catalogue, resolve

if TYPE_CHECKING:
    from trainvet.report import Report


class Action(enum.Enum):
    """What the callback is to do."""

    NOTHING = "nothing"
    ABORT = "abort"


class TrainingAborted(RuntimeError):  # noqa: N818 (it is what happened, not a fault)
    """The run was stopped because the user asked for it (``abort_on`` or ``skip_bad_updates``). ``report`` holds the report."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[TrainingAborted], tuple[str, Report]]:
        return type(self), (str(self), self.report)


class AbortOn:
    """Decides whether a finding ends the run. Built from "warning" | "error" | "fatal", or codes and defect names."""

    def __init__(self, abort_on: str | Sequence[str] | None, own: dict[str, str] | None = None) -> None:
        """``own`` maps names of the user's own rules to their codes. Raises ValueError for unknown names."""
        self.level: Severity | None = None
        self.codes: frozenset[str] = frozenset()
        self.names: frozenset[str] = frozenset()
        if abort_on is None:
            return
        names = [abort_on] if isinstance(abort_on, str) else list(abort_on)
        codes: set[str] = set()
        own_names: set[str] = set()
        for name in names:
            if name.upper() in Severity.__members__:
                level = Severity.parse(name)
                self.level = level if self.level is None else min(level, self.level)
            elif own and name in own and own[name] not in catalogue():
                own_names.add(name)  # not by code: all watchpoints have the same
            else:
                codes |= {kind.code for kind in resolve(name)}
        self.codes, self.names = frozenset(codes), frozenset(own_names)

    def __bool__(self) -> bool:
        return self.level is not None or bool(self.codes or self.names)

    def applies(self, finding: Finding) -> bool:
        """Is the run to end because of this finding?"""
        chosen = finding.code in self.codes or not self.names.isdisjoint((finding.code, finding.name))
        return chosen or (self.level is not None and finding.severity >= self.level)

"""What a rule says: a finding, its severity, and its plain form for files."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

Evidence = float | int | str | bool
FEW = 4  # places that are muted one by one


class Severity(enum.IntEnum):
    """How much a finding matters. Only exact or distribution-free rules may be FATAL."""

    INFO = 10
    WARNING = 20
    ERROR = 30
    FATAL = 40

    @classmethod
    def parse(cls, text: str | Severity) -> Severity:
        """Read "warning", "ERROR" or a Severity. Raises ValueError for anything else."""
        if isinstance(text, Severity):
            return text
        try:
            return cls[text.upper()]
        except KeyError:
            known = ", ".join(s.name.lower() for s in cls)
            raise ValueError(f"unknown severity {text!r}; one of {known}") from None


@dataclasses.dataclass(frozen=True)
class Finding:
    """One episode of one defect: what, where, since when, the numbers, and what to do.

    ``step`` is the optimizer-step attempt (Keras: batch) at which the criterion was met, ``first_step`` the one at
    which the condition began, both 0-based. ``subjects`` are the tensors or modules concerned, most upstream first;
    ``where`` is their readable form. ``evidence`` holds the measured numbers, ``threshold`` the limit they crossed.
    """

    code: str
    name: str
    severity: Severity
    step: int
    first_step: int
    message: str
    subjects: tuple[str, ...] = ()
    where: str = ""
    evidence: Mapping[str, Evidence] = dataclasses.field(default_factory=dict)
    threshold: str = ""
    causes: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    consequences: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        if not self.where:
            object.__setattr__(self, "where", place(self.subjects))

    @property
    def mute(self) -> tuple[str, ...]:
        """The ``ignore`` entries that would silence just this finding: one per place, the module they share where they are many."""
        if len(self.subjects) <= FEW:
            return tuple(f"{self.name}@{literal(subject)}" for subject in self.subjects) or (self.name,)
        parts = [subject.split(".") for subject in self.subjects]
        shared = [same[0] for same in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))]
        return (f"{self.name}@{literal('.'.join(shared))}" if shared else self.name,)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; non-finite evidence becomes the strings "nan", "inf", "-inf"."""
        return {
            "code": self.code,
            "name": self.name,
            "severity": self.severity.name.lower(),
            "step": self.step,
            "first_step": self.first_step,
            "where": self.where,
            "subjects": list(self.subjects),
            "message": self.message,
            "evidence": {key: plain(value) for key, value in self.evidence.items()},
            "threshold": self.threshold,
            "causes": list(self.causes),
            "fixes": list(self.fixes),
            "mute": list(self.mute),
            "consequences": [finding.to_dict() for finding in self.consequences],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
        return cls(
            code=str(data["code"]),
            name=str(data["name"]),
            severity=Severity.parse(data["severity"]),
            step=int(data["step"]),
            first_step=int(data["first_step"]),
            message=str(data["message"]),
            subjects=tuple(str(subject) for subject in data["subjects"]),
            where=str(data["where"]),
            evidence={str(key): unplain(value) for key, value in data["evidence"].items()},
            threshold=str(data["threshold"]),
            causes=tuple(str(cause) for cause in data["causes"]),
            fixes=tuple(str(fix) for fix in data["fixes"]),
            consequences=tuple(cls.from_dict(item) for item in data["consequences"]),
        )


def place(subjects: tuple[str, ...], most: int = 6) -> str:
    """Up to ``most`` names, then how many more there are."""
    shown = ", ".join(subjects[:most])
    return shown if len(subjects) <= most else f"{shown} and {len(subjects) - most} more"


def literal(name: str) -> str:
    """A name as a pattern that matches nothing else."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def plain(value: Any) -> Any:
    """A JSON-safe scalar: JSON has no NaN or infinity."""
    if isinstance(value, bool | str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def unplain(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    return float(value) if value in ("nan", "inf", "-inf") else value

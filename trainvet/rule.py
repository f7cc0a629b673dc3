"""The contract of a rule, the catalogue of all rules, and the page that explains one."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import inspect
import math
import pkgutil
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np

from trainvet.finding import Evidence, Finding, Severity
from trainvet.meaning import is_known, nearest
from trainvet.statistics import Facts, Snapshot, Vector

SECTIONS = ("What it checks", "Why it matters", "What to do", "Known limits")


@dataclasses.dataclass
class Rule:
    """One defect and how it is recognised. Pure: statistics in, findings out; no framework, no logger, no clock.

    A subclass is a dataclass in a file of its own below ``trainvet/rules``; the file's name is the defect's name. Its fields
    are the settings, each with a default. Its docstring is its page, with the four headings of ``SECTIONS``.

    ``reads`` lists the statistics it needs (nothing else is measured for it); an empty set means that it judges the facts
    alone. ``severity`` is the highest it usually speaks with. ``trust`` "preview" keeps it out of the default selection.
    ``sees_poison``: it is also shown data from after the first non-finite value, which other rules are spared.
    """

    code: ClassVar[str] = ""
    since: ClassVar[str] = "0.1"
    reads: ClassVar[frozenset[str]] = frozenset()
    severity: ClassVar[Severity] = Severity.WARNING
    trust: ClassVar[str] = "stable"
    sees_poison: ClassVar[bool] = False
    causes: ClassVar[tuple[str, ...]] = ()
    fixes: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """The defect's name, from the file: ``rules/dead_relu.py`` is "dead-relu"."""
        return defect(type(self))

    def begin(self, facts: Facts) -> Iterable[Finding]:
        """Called at the start and again when the plan changes (unfreezing, lazily built models). May already find something."""
        return ()

    def check(self, snapshot: Snapshot) -> Iterable[Finding]:
        """Called with every snapshot that holds something the rule reads, in order of steps."""
        return ()

    def end(self, step: int) -> Iterable[Finding]:
        """Called once when training ends in the ordinary way."""
        return ()

    def missing(self) -> str:
        """What evidence is still missing before the rule can judge ("2 of 5 samples"); empty once it could."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The rule's history as plain numbers, lists and strings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""

    def validate(self) -> None:
        """Raise ValueError for a setting that makes no sense. The base refuses numbers that are negative or not finite."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{self.name}: setting {field.name}={value!r} must be a finite number of at least 0")

    def finding(
        self,
        step: int,
        message: str,
        *,
        first_step: int | None = None,
        subjects: Sequence[str] = (),
        where: str = "",
        severity: Severity | None = None,
        evidence: Mapping[str, Evidence] | None = None,
        threshold: str = "",
        causes: Sequence[str] | None = None,
        fixes: Sequence[str] | None = None,
    ) -> Finding:
        """A finding of this rule, with the rule's own causes, fixes and severity where none are given."""
        return Finding(
            code=self.code,
            name=self.name,
            severity=self.severity if severity is None else severity,
            step=int(step),
            first_step=int(step if first_step is None else first_step),
            message=message,
            subjects=tuple(subjects),
            where=where,
            evidence=dict(evidence or {}),
            threshold=threshold,
            causes=tuple(self.causes if causes is None else causes),
            fixes=tuple(self.fixes if fixes is None else fixes),
        )


class Rows:
    """Which rows of a table a rule judges: looked up anew only when the choice or the table's names change."""

    def __init__(self) -> None:
        self._chosen: frozenset[str] = frozenset()
        self._of: tuple[str, ...] | None = None
        self.names: tuple[str, ...] = ()
        self.index: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, dtype=np.int64)
        self._among: dict[frozenset[str], np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def choose(self, names: Iterable[str]) -> None:
        """The subjects to be judged."""
        self._chosen, self._of = frozenset(names), None

    def find(self, names: tuple[str, ...]) -> bool:
        """Set ``names`` [S] and ``index`` int64 [S], the chosen rows of a table with these names. Are there any?"""
        if names is not self._of:
            rows = [row for row, name in enumerate(names) if name in self._chosen]
            self._of, self.names, self.index = names, tuple(names[row] for row in rows), np.array(rows, dtype=np.int64)
            self._among = {}
        return bool(self.names)

    def among(self, some: frozenset[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [S]: which of the chosen rows are in ``some``; looked up anew only where the rows or the set differ."""
        if some not in self._among:
            self._among[some] = np.array([name in some for name in self.names], dtype=bool)
        return self._among[some]

    def values(self, snapshot: Snapshot, key: str) -> Vector:
        """A statistic of the chosen rows, float64 [S]; NaN where it was not measured."""
        chosen: Vector = snapshot.values(key, self._of or ())[self.index]
        return chosen


class PerSubject:
    """Numbers kept per subject as float64 vectors that follow the subjects when the plan changes.

    ``PerSubject(count=0.0, first=-1.0)`` holds the vectors ``count`` and ``first``; new subjects start at these defaults.
    """

    def __init__(self, **defaults: float) -> None:
        self.defaults = defaults
        self.names: tuple[str, ...] = ()
        self._index: dict[str, int] = {}
        self._vectors: dict[str, Vector] = {key: np.empty(0) for key in defaults}

    def __getitem__(self, key: str) -> Vector:
        return self._vectors[key]

    def rows(self, names: tuple[str, ...]) -> slice | np.ndarray[Any, np.dtype[np.int64]]:
        """An index into the vectors that selects ``names`` in their order; unknown names are added, so ask for it before the vectors."""
        if names == self.names:
            return slice(None)
        fresh = [name for name in names if name not in self._index]
        if fresh:
            for name in fresh:
                self._index[name] = len(self._index)
            self.names = (*self.names, *fresh)
            for key, default in self.defaults.items():
                self._vectors[key] = np.concatenate([self._vectors[key], np.full(len(fresh), default)])
            if names == self.names:
                return slice(None)
        return np.array([self._index[name] for name in names], dtype=np.int64)

    def row(self, name: str) -> int:
        """The place of one subject in the vectors; -1 where it is not known."""
        return self._index.get(name, -1)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists."""
        return {"names": list(self.names), **{key: vector.tolist() for key, vector in self._vectors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.names = tuple(state["names"])
        self._index = {name: index for index, name in enumerate(self.names)}
        self._vectors = {key: np.array(state[key], dtype=np.float64) for key in self.defaults}


class Streak:
    """Debounce per subject: a condition must hold on ``patience`` consecutive samples; it is told once, again only after it was clear.

    ``update`` returns the positions (in ``names``) that reach their patience with this sample. ``first(name)`` is the step at
    which the present streak began.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._kept = PerSubject(count=0.0, first=-1.0, told=0.0)

    def update(
        self, names: tuple[str, ...], holds: np.ndarray[Any, np.dtype[np.bool_]], step: int, clear: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    ) -> list[int]:
        """``holds`` [S] bool; ``clear`` [S] bool re-arms a told subject (default: where ``holds`` is false)."""
        rows = self._kept.rows(names)
        holds = np.asarray(holds, dtype=bool)
        count = np.where(holds, self._kept["count"][rows] + 1, 0)
        first = np.where(count == 1, step, self._kept["first"][rows])
        told = np.where(~holds if clear is None else clear, 0.0, self._kept["told"][rows])
        due = holds & (count >= self.patience) & (told == 0)
        self._kept["count"][rows] = count
        self._kept["first"][rows] = first
        self._kept["told"][rows] = np.where(due, 1.0, told)
        return [int(position) for position in np.flatnonzero(due)]

    def first(self, name: str) -> int:
        """The step at which the subject's present streak began; -1 where there is none."""
        row = self._kept.row(name)
        return int(self._kept["first"][row]) if row >= 0 else -1

    def longest(self) -> int:
        """The longest present streak over all subjects."""
        return int(self._kept["count"].max()) if self._kept.names else 0

    def state_dict(self) -> dict[str, Any]:
        """Plain lists."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._kept.load_state_dict(state)


def defect(kind: type[Rule]) -> str:
    """The defect's name of a rule class: its file's name, or its class name for a rule defined outside the catalogue."""
    module = kind.__module__.rsplit(".", 1)
    if module[0] == "trainvet.rules":
        return module[1].replace("_", "-")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind.__name__).lower()


@functools.cache
def catalogue() -> dict[str, type[Rule]]:
    """All rules by code: those below ``trainvet.rules`` and those that packages register under "trainvet.rules".

    A package's rule that cannot be loaded, is none, or claims a code or name that is taken is left out with a warning: somebody else's package
    must not stop a training. Raises ValueError when two of our own claim one code.
    """
    import trainvet.rules

    rules: dict[str, type[Rule]] = {}
    for module in pkgutil.iter_modules(trainvet.rules.__path__):
        loaded = importlib.import_module(f"trainvet.rules.{module.name}")
        for kind in [kind for kind in vars(loaded).values() if _is_rule(kind) and kind.__module__ == loaded.__name__]:
            if kind.code in rules:
                raise ValueError(f"two rules claim the code {kind.code}: {rules[kind.code].__name__} and {kind.__name__}")
            rules[kind.code] = kind
    for point in entry_points(group="trainvet.rules"):
        try:
            kind = point.load()
            if not _is_rule(kind):
                raise TypeError(f"{point.value} is no Rule with a code")
            if kind.code in rules or defect(kind) in map(defect, rules.values()):
                raise ValueError(f"its code {kind.code} or name {defect(kind)} is taken")
            build(kind, {})
        except Exception as error:
            warnings.warn(f"trainvet: rule {point.name!r} of another package is left out: {error}", stacklevel=2)
            continue
        rules[kind.code] = kind
    return dict(sorted(rules.items()))


def _is_rule(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Rule) and value is not Rule and bool(value.code)


def resolve(pattern: str) -> list[type[Rule]]:
    """Rules meant by "default", "all", a code ("GR101"), a code prefix ("GR") or a defect name ("dead-relu").

    Raises ValueError with the nearest known names when nothing is meant.
    """
    rules = catalogue()
    if pattern == "all":
        return list(rules.values())
    if pattern == "default":
        return [kind for kind in rules.values() if kind.trust == "stable"]
    if pattern.upper() in rules:
        chosen = [rules[pattern.upper()]]
    elif re.fullmatch(r"[A-Za-z]{2}\d{0,3}", pattern):
        chosen = [kind for code, kind in rules.items() if code.startswith(pattern.upper())]
    else:
        chosen = [kind for kind in rules.values() if defect(kind) == pattern.lower().replace("_", "-")]
    if not chosen:
        known = [*rules, *(defect(kind) for kind in rules.values())]
        near = [code for code in rules if code[:2] == pattern[:2].upper()][:3] if re.fullmatch(r"[A-Za-z]{2}\d+", pattern) else []
        near = near or difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; known rules: {', '.join(rules)}"
        raise ValueError(f"unknown rule {pattern!r}{hint}")
    return chosen


def split_place(pattern: str) -> tuple[str, str]:
    """ "dead-relu@encoder.*" -> ("dead-relu", "encoder.*"); without a place the second part is empty."""
    rule, _, where = pattern.partition("@")
    return rule, where


def matches(where: str, subject: str) -> bool:
    """Does the glob ``where`` ("encoder.*") match a subject or one of the modules it lies in?"""
    parts = subject.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), where) for count in range(1, len(parts) + 1))


def build(kind: type[Rule], settings: Mapping[str, Any]) -> Rule:
    """A rule with settings. Raises ValueError for unknown names (with the nearest known) and impossible values."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key, value in settings.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(fields) or 'no settings'}"
            raise ValueError(f"{defect(kind)} has no setting {key!r}{hint}")
        default = fields[key].default
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if number != (isinstance(value, int | float) and not isinstance(value, bool)) or isinstance(default, bool) != isinstance(value, bool):
            raise ValueError(f"{defect(kind)}: setting {key}={value!r} must be of the same kind as its default {default!r}")
        if isinstance(default, int) and not isinstance(default, bool) and not float(value).is_integer():
            raise ValueError(f"{defect(kind)}: setting {key}={value!r} must be a whole number")
    rule = kind(**settings)
    rule.validate()
    unknown = [key for key in rule.reads if not is_known(key)]
    if unknown:
        raise ValueError(f"{rule.name} reads the unknown statistic {unknown[0]!r}; did you mean {nearest(unknown[0])}?")
    return rule


def explain(kind: type[Rule]) -> str:
    """The rule's page as Markdown: title, docstring, settings, causes and fixes."""
    lines = [f"# {kind.code} {defect(kind)}", "", f"Severity: {kind.severity.name.lower()}. Trust: {kind.trust}. Since: {kind.since}.", ""]
    lines.append(inspect.cleandoc(kind.__doc__ or ""))
    settings = [field for field in dataclasses.fields(kind) if field.init]
    if settings:
        lines += ["", "## Settings", *(f"- `{field.name}` = {field.default!r}" for field in settings)]
    if kind.causes:
        lines += ["", "## Likely causes", *(f"- {cause}" for cause in kind.causes)]
    if kind.fixes:
        lines += ["", "## What to try", *(f"- {fix}" for fix in kind.fixes)]
    if kind.reads:
        lines += ["", "Reads: " + ", ".join(f"`{key}`" for key in sorted(kind.reads)) + "."]
    return "\n".join(lines) + "\n"

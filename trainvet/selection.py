"""Which rules look, where, and with which numbers: the user's select, ignore, settings and rules arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainvet.finding import Finding
from trainvet.rule import Rule, build, catalogue, defect, matches, resolve, split_place

PROFILES: dict[str, tuple[str, ...]] = {
    "gan": ("LO", "GR101", "GR102", "WT105"),
    "rl": ("LO", "GR101"),
    "finetune": ("LO104", "LO108", "WT107", "WT106"),
}


ANY = "*"


@dataclasses.dataclass
class Selection:
    """Rules to run, the places each is limited to (by code), what is muted (name of the rule or ``ANY``, place), and the rules that were
    ignored (code to name). Built by :func:`choose`."""

    rules: dict[str, Rule] = dataclasses.field(default_factory=dict)
    only: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    muted: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    ignored: dict[str, str] = dataclasses.field(default_factory=dict)

    def narrow(self, finding: Finding) -> Finding | None:
        """The finding without the subjects that are out of scope or muted; None where nothing is left."""
        only = self.only.get(finding.code, ())
        muted = [where for name, where in self.muted if name in (finding.name, ANY)]
        if not only and not muted:
            return finding
        subjects = finding.subjects or (finding.where,)
        kept = tuple(
            subject
            for subject in subjects
            if (not only or any(matches(where, subject) for where in only)) and not any(matches(where, subject) for where in muted)
        )
        if not kept:
            return None
        if kept == subjects:
            return finding
        return dataclasses.replace(finding, subjects=kept, where="")

    def exemption(self, finding: Finding) -> str:
        """The user's ``ignore`` entries that concern a finding; empty where there are none."""
        subjects = finding.subjects or (finding.where,)
        entries = [(name, where) for name, where in self.muted if name in (finding.name, ANY) and any(matches(where, item) for item in subjects)]
        return ", ".join(f"{'' if name == ANY else name}@{where}" for name, where in entries)

    def merge(self, other: Selection) -> None:
        """Add another callback's selection. Raises ValueError when both give one rule different numbers."""
        for key, rule in other.rules.items():
            if rule.code not in catalogue():
                self.add(rule)
                continue
            if key in self.rules and self.rules[key] != rule:
                raise ValueError(f"two callbacks give {rule.name} different settings: {self.rules[key]} and {rule}")
            if key in self.rules and (key not in self.only or key not in other.only):
                self.only.pop(key, None)
            elif key in other.only:
                self.only[key] = (*self.only.get(key, ()), *other.only[key])
            self.rules.setdefault(key, rule)
        self.muted += [mute for mute in other.muted if mute not in self.muted]
        self.ignored = {code: name for code, name in {**self.ignored, **other.ignored}.items() if code not in self.rules}

    def arguments(self) -> dict[str, Any]:
        """What :func:`choose` would need to choose the same rules again, in JSON types: "select", "ignore", "settings" (numbers that are
        not the default). The names of the user's own rules, which cannot be written down, are under "own"."""
        select, own, settings = [], [], {}
        for key, rule in self.rules.items():
            if catalogue().get(rule.code) is not type(rule):
                own.append(rule.name)
                continue
            select += [f"{rule.code}@{where}" for where in self.only[key]] if key in self.only else [rule.code]
            given = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.init}
            numbers = {field.name: given[field.name] for field in dataclasses.fields(rule) if field.init and given[field.name] != field.default}
            if numbers:
                settings[rule.code] = numbers
        return {
            "select": select,
            "ignore": [f"{'' if name == ANY else name}@{where}" for name, where in self.muted],
            "settings": settings,
            "own": own,
        }

    def add(self, rule: Rule) -> None:
        """Add a rule of the user's own; several may have one code, as watchpoints do."""
        if rule in self.rules.values():
            return
        taken = sum(known.code == rule.code for known in self.rules.values())
        self.rules[f"{rule.code}#{taken}" if taken else rule.code] = rule


def choose(
    select: Sequence[str] = ("default",),
    ignore: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    rules: Iterable[Rule] = (),
) -> Selection:
    """Read the user's arguments. Raises ValueError with the nearest known names for a rule or setting that does not exist."""
    for label, value in (("select", select), ("ignore", ignore)):
        if isinstance(value, str):
            raise ValueError(f'{label}={value!r} must be a sequence of names, such as ("{value}",)')
    numbers: dict[str, Mapping[str, Any]] = {}
    for pattern, values in (settings or {}).items():
        for kind in resolve(pattern):
            numbers[kind.code] = {**numbers.get(kind.code, {}), **values}
    own = list(rules)
    for rule in own:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules={rule!r} must be Rule or Watchpoint objects")
    selection = Selection()
    whole: set[str] = set()
    for pattern in select:
        name, where = split_place(pattern)
        for kind in resolve(name):
            selection.rules.setdefault(kind.code, build(kind, numbers.get(kind.code, {})))
            if where:
                selection.only[kind.code] = (*selection.only.get(kind.code, ()), where)
            else:
                whole.add(kind.code)
    for code in whole:
        selection.only.pop(code, None)
    for rule in own:
        rule.validate()
        selection.add(rule)
    for pattern in ignore:
        name, where = split_place(pattern)
        if where and not name:
            selection.muted.append((ANY, where))
            continue
        meant = {rule.name for rule in own if name in (rule.name, rule.code)} or {defect(kind) for kind in resolve(name)}
        if where:
            selection.muted += [(item, where) for item in sorted(meant)]
        else:
            selection.ignored |= {rule.code: rule.name for rule in selection.rules.values() if rule.name in meant}
            selection.rules = {key: rule for key, rule in selection.rules.items() if rule.name not in meant}
    unused = [code for code in numbers if code not in selection.rules]
    if unused:
        kind = resolve(unused[0])[0]
        raise ValueError(f"settings are given for {defect(kind)}, which is not selected")
    return selection

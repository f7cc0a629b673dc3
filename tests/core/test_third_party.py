"""Rules of other packages: found by their entry points, listed, explained and run like ours; a bad one stops nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RULES = '''
import dataclasses
from trainvet import Rule
from trainvet.statistics import Snapshot

PAGE = """
## What it checks
The loss is below ``floor``.
## Why it matters
Acme says so.
## What to do
Ask Acme.
## Known limits
None that Acme knows.
"""

@dataclasses.dataclass
class LowLoss(Rule):
    __doc__ = PAGE
    code = "ACME001"
    reads = frozenset({"loss.value"})
    causes = ("it learns",)
    fixes = ("enjoy it",)
    floor: float = 0.5

    def check(self, snapshot: Snapshot):
        for track in snapshot.tracks("loss.value").values():
            for step, value in zip(track.steps, track.values):
                if value < self.floor:
                    yield self.finding(step, f"the loss is {value:.2g}")

@dataclasses.dataclass
class Raising(LowLoss):
    __doc__ = PAGE
    code = "ACME002"
    def check(self, snapshot: Snapshot):
        raise RuntimeError("acme is broken")

@dataclasses.dataclass
class Claimed(LowLoss):
    __doc__ = PAGE
    code = "AC101"

@dataclasses.dataclass
class Misreading(LowLoss):
    __doc__ = PAGE
    code = "ACME003"
    reads = frozenset({"loss.valeu"})
'''
POINTS = """[trainvet.rules]
low = acme:LowLoss
raising = acme:Raising
claimed = acme:Claimed
misreading = acme:Misreading
gone = acme_gone:Rule
number = acme:PAGE
"""


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme.py").write_text(RULES)
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return folder


def python(acme, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(acme), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=True)


def test_they_are_listed_and_explained(acme):
    listed = python(acme, "-m", "trainvet", "rules")
    assert "ACME001" in listed.stdout
    assert "low-loss" in listed.stdout
    page = python(acme, "-m", "trainvet", "rule", "low-loss").stdout
    assert page.startswith("# ACME001 low-loss")
    assert "`floor` = 0.5" in page
    assert python(acme, "-m", "trainvet", "rule", "acme001").stdout == page


def test_what_cannot_be_used_is_left_out_with_the_reason(acme):
    warned = python(acme, "-m", "trainvet", "rules").stderr
    for reason in ("'claimed'", "AC101 or name claimed is taken", "did you mean loss.value", "acme_gone", "is no Rule"):
        assert reason in warned


def test_they_run_and_one_that_raises_is_switched_off(acme):
    code = """
import warnings; warnings.simplefilter("ignore")
import numpy as np
from trainvet.monitor import Monitor
from trainvet.selection import choose
from trainvet.statistics import Facts, Snapshot, Track
monitor = Monitor(choose(settings={"low-loss": {"floor": 0.25}}))
monitor.begin(Facts())
for step in range(4):
    steps = np.array([step])
    monitor.observe(Snapshot(step, step + 1, series={"loss.value": {"loss": Track(steps, steps + 1, np.array([0.3 - step / 10]))}}))
report = monitor.end()
print([(item.code, item.step, item.message) for item in report.findings])
print([item.detail for item in report.coverage if item.code == "ACME002"], len(report.errors), report.errors[0].splitlines()[0])
"""
    first, second = python(acme, "-c", code).stdout.splitlines()
    assert first == "[('ACME001', 1, 'the loss is 0.2')]"
    assert second == """["RuntimeError('acme is broken')"] 1 ACME002 raising was switched off"""

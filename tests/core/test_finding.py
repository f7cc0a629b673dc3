from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from trainvet.finding import Finding, Severity, place

FINDING = Finding("GR101", "exploding-gradient", Severity.WARNING, 12, 10, "the norm rises", subjects=("a.weight",))


def test_a_finding_survives_json():
    numbers = {"ratio": 0.25, "count": 3, "dtype": "float16", "frozen": True, "nan": math.nan, "up": math.inf, "down": -math.inf}
    full = dataclasses.replace(FINDING, evidence=numbers, threshold="10", causes=("a",), fixes=("b",), consequences=(FINDING,))
    text = json.dumps(full.to_dict(), allow_nan=False)
    back = Finding.from_dict(json.loads(text))
    assert back.to_dict() == full.to_dict()
    assert math.isnan(back.evidence["nan"])
    assert (back.evidence["up"], back.evidence["down"]) == (math.inf, -math.inf)
    assert dataclasses.replace(back, evidence={}) == dataclasses.replace(full, evidence={})


def test_numpy_scalars_become_plain():
    found = dataclasses.replace(FINDING, evidence={"a": np.float32(0.5), "b": np.float64(np.nan), "c": np.int64(3)})
    assert json.loads(json.dumps(found.to_dict()))["evidence"] == {"a": 0.5, "b": "nan", "c": 3.0}


def test_severity_is_ordered_and_read_from_text():
    assert Severity.INFO < Severity.WARNING < Severity.ERROR < Severity.FATAL
    assert Severity.parse("Warning") is Severity.WARNING
    assert Severity.parse(Severity.FATAL) is Severity.FATAL
    with pytest.raises(ValueError, match="unknown severity 'warn'; one of info, warning, error, fatal"):
        Severity.parse("warn")


def test_the_place_is_readable():
    assert FINDING.where == "a.weight"
    assert place(tuple("abcdef")) == "a, b, c, d, e, f"
    assert place(tuple("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert dataclasses.replace(FINDING, where="encoder").where == "encoder"


def test_the_line_that_mutes_it():
    assert FINDING.mute == ("exploding-gradient@a.weight",)
    assert dataclasses.replace(FINDING, subjects=("a", "b")).mute == ("exploding-gradient@a", "exploding-gradient@b")


def test_many_places_are_muted_by_the_module_they_share():
    many = tuple(f"net.encoder.{index}.weight" for index in range(9))
    assert dataclasses.replace(FINDING, subjects=many).mute == ("exploding-gradient@net.encoder",)
    assert dataclasses.replace(FINDING, subjects=(*many, "head.weight")).mute == ("exploding-gradient",)
    assert dataclasses.replace(FINDING, subjects=("loss [a]",)).mute == ("exploding-gradient@loss [[]a]",)

from __future__ import annotations

import pytest

from tests.series import findings, run
from trainvet.rules.index_out_of_range import IndexOutOfRange
from trainvet.statistics import Facts, Layer, Subject

TABLE = Facts(
    layers=(Layer("words", "Embedding", "embedding", width_in=100, width_out=8), Layer("head", "Linear", "linear", width_in=8, width_out=2))
)


def indices(low, high):
    return {"module.index_min": {"words": low}, "module.index_max": {"words": high}}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([0, 0], [99, 99], []),
        ([0, 0], [99, 100], [(1, "IN111")]),
        ([-1], [5], [(0, "IN111")]),
        ([0], [float("nan")], []),
        ([3, 3], [100, 500], [(0, "IN111")]),
    ],
)
def test_rows_that_are_there(low, high, expected):
    assert run(IndexOutOfRange(), None, indices(low, high), TABLE) == expected


def test_the_fix_names_the_size():
    (found,) = findings(IndexOutOfRange(), None, indices([0], [104]), TABLE)
    assert found.subjects == ("words",)
    assert found.fixes[0] == "make the table at least 105 rows large (it has 100)"
    (found,) = findings(IndexOutOfRange(), None, indices([-1], [4]), TABLE)
    assert found.fixes[0] == "map the id -1 to a row of its own"


def test_a_table_that_was_never_traced_is_known_by_its_parameter():
    facts = Facts(subjects=(Subject("words.weight", "parameter", "words", shape=(10, 4), role="embedding"),))
    assert run(IndexOutOfRange(), None, indices([0], [10]), facts) == [(0, "IN111")]


def test_unknown_tables_are_not_judged():
    rule = IndexOutOfRange()
    assert run(rule, None, indices([0], [10**6])) == []
    assert rule.missing() == "no embedding was seen"

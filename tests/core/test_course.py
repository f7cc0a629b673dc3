from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.noise import noise
from trainvet.course import HALF, Course


def course(means, rates=None, planned=0.0):
    out = Course()
    for mean, rate in zip(means, rates if rates is not None else [np.nan] * len(means), strict=True):
        out.add(float(mean), float(rate), planned)
    return out


def test_due_after_200_400_and_800_rows():
    out, due = Course(), []
    for block in range(1, 100):
        out.add(1.0, np.nan)
        if out.due:
            due.append(block * 10)
            out.due = False
    assert due == [200, 400, 800]
    assert len(out.blocks) < 4 * HALF


def test_merged_blocks_are_means_over_all_rows():
    out = course(np.arange(80))
    assert out.width == 4
    assert [block[0] for block in out.blocks] == [4 * block + 1.5 for block in range(20)]
    assert out.rows == 800


def test_the_blocks_of_a_warm_up_are_dropped():
    out = course(np.arange(30), np.linspace(1 / 30, 1, 30))
    assert [block[0] for block in out.blocks] == list(range(14, 30))
    assert course(np.arange(30), [0.1] * 30, planned=1.0).rows == 0
    assert course(np.arange(30), np.linspace(1, 0, 30)).rows == 300


def test_the_halves():
    halves = course([3.0] * 10 + [1.0] * 10).halves()
    assert dataclasses.astuple(halves) == (pytest.approx(50 / 175**0.5), 3.0, 1.0, 1.0, 2.0, 0.0, 3.0)
    assert course([1.0] * 20).halves().z == 0


def test_the_error_is_that_of_the_difference():
    for kind, low, high in (("gaussian", 0.8, 1.2), ("ar", 0.5, 1.6)):
        halves = [course(noise(kind, 200, seed).reshape(20, 10).mean(axis=1)).halves() for seed in range(300)]
        true = np.std([half.drop for half in halves])
        assert low * true < np.mean([half.error for half in halves]) < high * true, kind


def test_a_round_trip_as_plain_numbers():
    out = course(np.arange(57))
    assert Course(**dataclasses.asdict(out)) == out

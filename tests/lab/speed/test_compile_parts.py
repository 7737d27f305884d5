"""The compile benchmark's parts are all there, and its break-even is what the rounds say."""

from __future__ import annotations

import math

import pytest

from lab.speed.compile import (
    APPEND,
    CANONICAL,
    CONDITIONED,
    DEFICIT,
    FACTORS,
    RECALL,
    STORING,
    break_even,
    even_rows,
    goals,
    part_rows,
    run,
)
from lab.speed.timing import Measured, Spread
from tests.lab.speed.beds import SMALL, TOKENS

PARTS = (CANONICAL, CONDITIONED, DEFICIT, FACTORS, STORING, RECALL, APPEND)


@pytest.fixture(scope="module")
def found():
    return {section.title: section.rows for section in run(SMALL).sections}


def rounds(**by_part: tuple[float, ...]) -> Measured:
    names = {"canonical": CANONICAL, "conditioned": CONDITIONED, "deficit": DEFICIT, "factors": FACTORS}
    return Measured({**{names.get(n, n): s for n, s in by_part.items()}}, {})


TIMED = rounds(
    canonical=(3.0, 3.0),
    conditioned=(6.0, 12.0),
    deficit=(0.5, 0.5),
    factors=(1.0, 1.0),
    storing=(0.5, 0.5),
    recall=(1.0, 2.0),
)


def test_every_part_is_timed(found):
    rows = found["Forming a patch, part by part"]
    assert [(r["tokens"], r["part"]) for r in rows] == [(TOKENS, part) for part in PARTS]
    for row in rows:
        assert 0.0 < row["ms"].low <= row["ms"].high < math.inf
    of_itself = next(r for r in rows if r["part"] == CONDITIONED)
    assert of_itself["share of the conditioned forward"] == Spread(1.0, 1.0, 1.0)


def test_reuses_are_extra_seconds_over_those_a_reuse_saves():
    assert break_even(TIMED, (CANONICAL, FACTORS)) == [4.0 / 5.0, 4.0 / 10.0]
    harvested, ahead = even_rows(TIMED, 8)
    assert harvested["reuses"] == Spread.of([5.0 / 5.0, 5.0 / 10.0])
    assert ahead["reuses"] == Spread.of([11.0 / 5.0, 17.0 / 10.0])


def test_a_share_is_taken_round_by_round():
    shares = {r["part"]: r["share of the conditioned forward"] for r in part_rows(TIMED, 8)}
    assert shares[FACTORS] == Spread.of([1.0 / 6.0, 1.0 / 12.0])


def test_goals_depend_on_the_device_and_on_savings():
    parts = part_rows(TIMED, 8)
    orbit = {"in tokens, times the window": 5.5}
    cpu = goals(parts, even_rows(TIMED, 8), orbit, "cpu")
    assert [g["met"] for g in cpu] == [True, True, True, False]
    assert not goals(parts, even_rows(TIMED, 8), orbit, "cuda:0")[0]["met"]
    slow = Measured({**{part: (1.0,) for part in PARTS}, RECALL: (2.0,)}, {})
    assert [g["met"] for g in goals(parts, even_rows(slow, 8), orbit, "cpu")[1:3]] == [False, False]


def test_the_orbit_patch_is_counted_by_the_window_itself(found):
    (row,) = found["Orbit patch of 4 antecedents"]
    assert row["forwards"] > 0
    assert row["in tokens, times the chunk"] == 5 * row["in tokens, times the window"]
    assert row["in tokens, times the chunk"] >= 5

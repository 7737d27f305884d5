"""Rows of the tables: who is pooled with whom, and against what η is taken."""

from __future__ import annotations

import numpy as np
import pytest

from lab.paper.tally import MULTI, ONE, Row, Tally
from lab.paper.trial import Judged


def judged(kl, hops, agree=None, nbytes=0.0) -> Judged:
    count = len(kl)
    agree = np.ones(count) if agree is None else np.array(agree, dtype=float)
    hops = np.array(hops, dtype=float)
    return Judged(agree, agree, np.array(kl, dtype=float), hops, nbytes, nbytes / 100, nbytes / 100, 1.0, 0.0)


def only(rows, arm: str, kind: str) -> Row:
    (row,) = [r for r in rows if (r.arm, r.kind) == (arm, kind)]
    return row


def test_windows_are_pooled_and_hops_kept_apart():
    tally = Tally()
    for kl in ([1.0, 3.0, 8.0], [1.0, 1.0, 8.0]):
        arm = judged(kl, [2, 3, 1], nbytes=10.0)
        tally.add("t", "arm", arm, judged([4.0, 4.0, 16.0], [2, 3, 1]), K=3)
    rows = list(tally.rows(by_hops=["t"]))
    assert {r.kind for r in rows} == {MULTI, "2 hops", "3 hops", ONE}
    pooled = only(rows, "arm", MULTI)
    assert (pooled.n, pooled.kl.mean, pooled.eta.mean) == (4, 1.5, 1 - 1.5 / 4)
    assert only(rows, "arm", "2 hops").eta.mean == 0.75
    assert only(rows, "arm", ONE).eta.mean == 0.5
    assert (pooled.nbytes, pooled.share, pooled.setting) == (10.0, 0.1, {"K": 3})
    assert tally.questions("t") == 4


def test_hops_are_rows_only_where_asked_for():
    tally = Tally()
    tally.add("t", "arm", judged([1.0, 1.0], [2, 3]), judged([2.0, 2.0], [2, 3]))
    assert [r.kind for r in tally.rows()] == [MULTI]


def test_an_arm_is_compared_on_the_questions_it_was_asked():
    tally = Tally()
    blind = judged([4.0, 2.0, 100.0], [2, 2, 1], agree=[0, 1, 1])
    tally.add("t", "per question", judged([1.0, 2.0], [2, 2], agree=[1, 1]), blind)
    (row,) = tally.rows()
    assert row.eta.mean == pytest.approx(1 - 3 / 6)
    assert (row.n, row.flip_recover.mean) == (2, 1.0)


def test_a_section_has_the_questions_of_its_furthest_arm():
    tally = Tally()
    few, many = judged([1.0], [2]), judged([1.0, 1.0, 1.0], [2, 2, 1])
    tally.add("t", "few", few, few)
    tally.add("t", "many", many, many)
    assert tally.questions("t") == 1
    assert tally.questions("another") == 0


def test_numbers_are_averaged_and_undefined_ones_left_out():
    tally = Tally()
    for value in (1.0, 3.0, float("nan")):
        tally.note("t", "norm", value, layer=2)
    (number,) = tally.numbers()
    assert (number.n, number.value.mean, number.setting) == (2, 2.0, {"layer": 2})

"""Sketches of questions: alike by their tokens, small, and telling none of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera.trust import sketch
from kamera.trust.sketch import alike, is_sketch, kinds

IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@given(IDS, st.randoms())
def test_order_and_number_do_not_count(ids, random):
    shuffled = [*ids, ids[0]]
    random.shuffle(shuffled)
    assert sketch(shuffled) == sketch(ids)
    assert is_sketch(sketch(ids))


@pytest.mark.parametrize(("common", "wanted"), [(0, False), (2, False), (7, True), (9, True), (10, True)])
@pytest.mark.parametrize("seed", range(5))
def test_most_tokens_in_common_are_alike(seed, common, wanted):
    first = 1_000 * seed
    one = range(first, first + 10)
    other = [*range(first, first + common), *range(first + 500, first + 510 - common)]
    assert alike(sketch(one), sketch(other)) is wanted


def test_long_questions_are_told_apart():
    one, other = sketch(range(3_000)), sketch(range(10_000, 13_000))
    assert not alike(one, other)
    assert alike(one, sketch(range(200, 3_000)))


def test_kinds_are_counted_once():
    assert kinds([]) == 0
    a, near, b, empty = (sketch(ids) for ids in (range(8), range(1, 9), range(50, 58), ()))
    assert kinds([a, near, b, a, empty]) == 3


@pytest.mark.parametrize("wrong", ["", "f" * 63, "f" * 65, "F" * 64, "g" * 64, 7, None, ["f" * 64]])
def test_what_is_no_sketch_is_seen(wrong):
    assert not is_sketch(wrong)

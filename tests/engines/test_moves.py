"""What a show writes, decided from sources, offsets and lengths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kamera.engines.moves import Move, Stand, Written, plan_moves

WHOLE = Move(None, False, True)


def row(*spans: tuple) -> list[Stand]:
    return [Stand(source, (offset,), length) for source, offset, length in spans]


def test_what_stands_where_it_should_is_taken_over():
    a, b, c, d = row(("a", 0, 3), ("b", 0, 4), ("c", 2, 5), ("d", 0, 1))
    assert plan_moves([a, b, c], [b, c, d]) == [Move(1, False, False), Move(2, False, False), WHOLE]
    assert plan_moves([], [a]) == [WHOLE]


def test_another_offset_turns_and_another_source_is_written():
    a, turned, other = row(("a", 0, 3), ("a", 4, 3), ("z", 0, 3))
    assert plan_moves([a], [turned]) == [Move(0, True, True)]
    assert plan_moves([a], [other]) == [WHOLE]


def test_most_spans_keep_their_order_and_the_others_are_written():
    a, b, c, d = row(*((name, 0, 2) for name in "abcd"))
    made = plan_moves([a, b, c, d], [d, a, b, c])
    assert [m.was for m in made] == [None, 0, 1, 2]


def test_bytes_add_up():
    assert Written(1, 2) + Written(3, 4) == Written(4, 6)


spans = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 1), st.integers(0, 3)), max_size=8)


@given(standing=spans, wanted=spans)
def test_a_span_is_taken_over_once_from_its_own_source_and_in_order(standing, wanted):
    old, new = row(*standing), row(*wanted)
    made = plan_moves(old, new)
    kept = [(m.was, n) for m, n in zip(made, new, strict=True) if m.was is not None]
    assert all(a < b for (a, _), (b, _) in pairwise(kept))
    assert all(old[was].source == n.source for was, n in kept)
    for move, n in zip(made, new, strict=True):
        assert move.turns == (move.was is not None and old[move.was].offset != n.offset)
    if new and old[: len(new)] == new and len({s.source for s in old}) == len(old):
        assert not any(m.writes for m in made)

"""What a show writes, decided from sources, offsets and lengths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kamera.engines.moves import Stand, plan_moves


def row(*spans: tuple) -> list[Stand]:
    return [Stand(source, (offset,), length) for source, offset, length in spans]


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

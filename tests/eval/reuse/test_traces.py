"""What a window goes through before it stands as published."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kamera.eval.reuse import Item, draw_items
from kamera.eval.reuse.traces import CONTEXTS, TURNOVERS, draw_traces
from kamera.eval.tasks.sample import Picture, TaskSample

PICTURE = Picture("a.png")


def traced(size: int, seed: int) -> Item:
    """Donors are the indices from ``size`` on, but the last, which is the filler's."""
    sample = TaskSample("x", "t", (PICTURE,) * size, "question?", "a", others=(PICTURE,) * size)
    return Item(sample, draw_traces(sample, seed))


@given(size=st.integers(4, 12), seed=st.integers(0, 10_000))
def test_every_trace_ends_in_the_published_window(size, seed):
    item = traced(size, seed)
    item.check()  # no unit twice in a window, no unknown one, the published window last
    assert list(item.traces) == [
        *("published", "shuffled", "shifted", "slid"),
        *(f"recalled@{t:g}" for t in TURNOVERS),
        *("swapped", "contexts"),
    ]
    assert traced(size, seed) == item


@given(size=st.integers(4, 12), seed=st.integers(0, 10_000))
def test_every_trace_does_what_its_name_says(size, seed):
    by_name, filler = traced(size, seed).traces, 2 * size - 1
    window, last = tuple(range(size)), size - 1
    assert by_name["published"] == (window, window)
    (shuffled, _) = by_name["shuffled"]
    assert set(shuffled) == set(window) and shuffled != window
    assert by_name["shifted"][0] == (filler, *window)
    assert by_name["slid"][0][1:] == window[:-1] and size <= by_name["slid"][0][0] < filler
    for turnover in TURNOVERS:
        first, *between, _ = by_name[f"recalled@{turnover:g}"]
        replaced = sum(a != b for a, b in zip(first[:-1], window[:-1], strict=True))
        assert replaced == round(turnover * (size - 1)) and first[-1] == last
        assert all(last not in away for away in between) and between[-1] == window[:-1]
    (swapped, _) = by_name["swapped"]
    assert sum(a != b for a, b in zip(swapped, window, strict=True)) == 1 and swapped[-1] == last
    contexts = by_name["contexts"]
    assert len(contexts) == CONTEXTS and all(shown[-1] == last for shown in contexts)


def test_seeds_draw_other_traces_and_the_questions_are_bound():
    one, other = traced(8, 0), traced(8, 1)
    assert one.traces != other.traces
    items = list(draw_items("testbed", None, count=3, seed=5))
    assert items == list(draw_items("testbed", None, count=3, seed=5))
    assert all(len(item.sample.parts) >= 4 and item.sample.meta["hops"] > 1 for item in items)

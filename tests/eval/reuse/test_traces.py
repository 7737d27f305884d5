"""What a window goes through before it stands as published."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kamera.eval.reuse import Item
from kamera.eval.reuse.traces import TURNOVERS, draw_traces
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

"""The order of windows: nothing is prefilled twice, whatever the order of the plan."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kamera.compile.trie import leaves

WINDOWS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(tuple), max_size=8)


def prefills(order) -> int:
    """Chunks prefilled by who runs windows in this order and keeps what neighbours have in common."""
    count, before = 0, ()
    for window in order:
        same = 0
        while same < min(len(before), len(window)) and before[same] == window[same]:
            same += 1
        count += len(window) - same
        before = window
    return count


def nodes(windows) -> set:
    return {window[:n] for window in windows for n in range(1, len(window) + 1)}


@given(WINDOWS)
def test_every_prefix_is_prefilled_once(windows):
    assert prefills(leaves(windows)) == len(nodes(windows))


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple), max_size=5))
def test_no_order_of_the_lines_is_cheaper(windows):
    cheapest = min(prefills(order) for order in itertools.permutations(windows))
    assert prefills(leaves(windows)) <= cheapest <= prefills(windows)

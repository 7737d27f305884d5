"""The order of windows: nothing is prefilled twice, whatever the order of the plan."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kamera.compile.trie import leaves, prefixes

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


@given(WINDOWS, st.integers(0, 10**6))
def test_the_walk_is_independent_of_order_and_number_of_lines(windows, seed):
    mixed = [*windows, *windows[:2]]
    random.Random(seed).shuffle(mixed)
    assert leaves(mixed) == leaves(windows) == leaves(nodes(windows))


@given(WINDOWS)
def test_the_nodes_of_a_window_are_its_beginnings(windows):
    assert {node for window in windows for node in prefixes(window)} == nodes(windows)


def test_a_window_of_which_no_chunk_can_be_had_is_no_path():
    assert leaves([()]) == leaves([]) == []

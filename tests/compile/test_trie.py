"""The order of windows: nothing is prefilled twice, whatever the order of the plan."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kamera.compile.trie import leaves, prefixes, shards

WINDOWS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(tuple), max_size=8)
TOKENS = {"a": 3, "b": 5, "c": 8, "d": 1}


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
    assert leaves([()]) == leaves([]) == shards([], TOKENS, 0) == []


def cost(paths) -> int:
    return sum(TOKENS[p[-1]] for p in nodes(paths))


@given(WINDOWS, st.integers(0, 60))
def test_shards_are_runs_of_the_walk_within_the_limit(windows, limit):
    walk = leaves(windows)
    runs = shards(walk, TOKENS, limit)
    assert [path for run in runs for path in run] == walk
    for run in runs:
        assert len(run) == 1 or cost(run) <= limit


@given(WINDOWS)
def test_no_limit_gives_one_shard_and_zero_one_per_path(windows):
    walk = leaves(windows)
    assert len(shards(walk, TOKENS, 10**6)) == bool(walk)
    assert len(shards(walk, TOKENS, 0)) == len(walk)


def test_a_cut_is_made_where_the_least_is_shared():
    stems = [tuple("ab"), tuple("cb")]
    walk = leaves([(*stem, x, y) for stem in stems for x in "abc" for y in "abcd"])
    whole = cost(walk)
    # two stems of equal weight: a limit with some room still cuts between them, not inside one
    runs = shards(walk, TOKENS, round(whole * 0.7))
    assert [run[0][0] for run in runs] == ["a", "c"]
    assert sum(map(cost, runs)) == whole

"""The order of windows: nothing is prefilled twice, whatever the order of the plan."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kamera.compile.ordering import shards, walk

WINDOWS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(tuple), max_size=8)
TOKENS = {"a": 3, "b": 5, "c": 8, "d": 1}


def prefills(order) -> int:
    """Chunks prefilled by who runs windows in this order and keeps what neighbours have in common."""
    count, held = 0, ()
    for window in order:
        same = 0
        while same < min(len(held), len(window)) and held[same] == window[same]:
            same += 1
        count += len(window) - same
        held = window
    return count


def prefixes(windows) -> set:
    return {window[:n] for window in windows for n in range(1, len(window) + 1)}


@given(WINDOWS)
def test_every_prefix_is_prefilled_once(windows):
    assert prefills(walk(windows).paths) == len(prefixes(windows))


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple), max_size=5))
def test_no_order_of_the_lines_is_cheaper(windows):
    cheapest = min(prefills(order) for order in itertools.permutations(windows))
    assert prefills(walk(windows).paths) <= cheapest <= prefills(windows)


@given(WINDOWS, st.integers(0, 10**6))
def test_the_walk_is_independent_of_order_and_number_of_lines(windows, seed):
    mixed = [*windows, *windows[:2]]
    random.Random(seed).shuffle(mixed)
    assert walk(mixed) == walk(windows)


@given(WINDOWS)
def test_a_node_is_a_chunk_with_its_antecedents(windows):
    walked = walk(windows)
    nodes = {}
    for window in windows:
        places = walked.places(window)
        assert len(places) == len(window)
        for n, node in enumerate(places, start=1):
            assert nodes.setdefault(node, window[:n]) == window[:n]
    assert len(nodes) == len(set(nodes.values())) == len(prefixes(windows))


def test_a_window_of_which_no_chunk_can_be_had_has_no_places():
    assert walk([()]).paths == ()
    assert walk([()]).places(()) == walk([tuple("ab")]).places(()) == ()


@given(WINDOWS)
def test_a_node_belongs_to_one_path(windows):
    walked = walk(windows)
    own = [n for nodes, first in zip(walked.nodes, walked.shared, strict=True) for n in nodes[first:]]
    assert sorted(own) == list(range(len(prefixes(windows))))


def cost(paths) -> int:
    return sum(TOKENS[p[-1]] for p in prefixes(paths))


@given(WINDOWS, st.integers(0, 60))
def test_shards_are_runs_of_the_walk_within_the_limit(windows, limit):
    walked = walk(windows)
    runs = shards(walked, TOKENS, limit)
    assert [i for run in runs for i in run] == list(range(len(walked.paths)))
    for run in runs:
        assert len(run) == 1 or cost(walked.paths[run.start : run.stop]) <= limit


@given(WINDOWS)
def test_no_limit_gives_one_shard_and_zero_one_per_path(windows):
    walked = walk(windows)
    assert len(shards(walked, TOKENS, 10**6)) == bool(walked.paths)
    assert len(shards(walked, TOKENS, 0)) == len(walked.paths)


def test_a_cut_is_made_where_the_least_is_shared():
    stems = [tuple("ab"), tuple("cb")]
    walked = walk([(*stem, x, y) for stem in stems for x in "abc" for y in "abcd"])
    whole = cost(walked.paths)
    # two stems of equal weight: a limit with some room still cuts between them, not inside one
    runs = shards(walked, TOKENS, round(whole * 0.7))
    assert [walked.paths[run.start][0] for run in runs] == ["a", "c"]
    assert sum(cost(walked.paths[run.start : run.stop]) for run in runs) == whole

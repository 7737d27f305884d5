"""Windows found at every place: none missed, none believed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import gear
from kamera.reuse import RULES, ContentIndex, Media, Prompt
from kamera.reuse.scan import Scan, window_stops

RULE = RULES["high"]


def text(seed: int, count: int, alphabet: int = 30_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, alphabet, count).astype(np.uint32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(63, 400), st.integers(0, 700), st.sampled_from(sorted(RULES)))
def test_a_moved_region_is_found_to_the_token(seed, size, shift, rule):
    region = text(seed, size)
    index = ContentIndex(RULES[rule])
    index.add(Prompt.of(np.concatenate([text(seed + 1, 321), region, text(seed + 2, 100)])))
    asked = np.concatenate([text(seed + 3, shift), region, text(seed + 4, 50)])
    found = index.find(Prompt.of(asked))
    for hit in found.hits:
        there = index.content(hit.segment).ids[4 * hit.offset :]
        assert there.startswith(Prompt.of(asked[hit.start : hit.stop]).raw)
    inside = {at for hit in found.hits for at in range(hit.start, hit.stop)}
    assert set(range(max(shift, found.prefix), shift + size)) <= inside
    assert len(inside) < size + 4  # hardly more, by chance


def test_hits_are_apart_and_in_order():
    region = np.tile(text(0, 40), 20)
    index = ContentIndex(RULE)
    index.add(Prompt.of(region))
    hits = index.find(Prompt.of(np.concatenate([text(1, 7), region]))).hits
    assert hits
    assert all(a.stop <= b.start for a, b in itertools.pairwise(hits))


def test_a_scan_finds_nothing_in_a_picture():
    ids = text(0, 300)
    index = ContentIndex(RULE)
    index.add(Prompt.of(ids))
    for edge in (50, 20, 0):
        asked = Prompt.of(np.concatenate([text(1, 9), ids]), media=[Media(edge, 250, "red")])
        hits = index.find(asked).hits
        assert hits
        assert not any(h.start < 250 and h.stop > edge for h in hits)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3_000), st.sampled_from([3, 30_000]))
def test_the_hash_behind_each_token_sees_32_tokens(seed, count, alphabet):
    ids = text(seed, count, alphabet)
    hashes = gear(ids)
    for place in range(31, count, 97):
        alone = gear(ids[place - 31 : place + 1])[-1]
        assert hashes[place] == alone


def test_a_table_that_grew_knows_all_its_windows():
    scan = Scan()
    blocks = [text(seed, 40_000) for seed in range(3)]
    stops = window_stops(0, 40_000)
    for node, block in enumerate(blocks):
        scan.add(gear(block)[stops - 1], [(node, int(stop)) for stop in stops])
    for node, block in enumerate(blocks):
        found = dict(scan.candidates(block))
        assert all((node, stop) in found[stop] for stop in stops.tolist())
    scan.remove(gear(blocks[0])[stops - 1], 0)
    assert not [*scan.candidates(blocks[0])]
    assert len([*scan.candidates(blocks[1])]) >= len(stops)
    assert not [*scan.candidates(text(9, 31))]


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 32), (31, 32), (32, 33), (32, 64), (5, 200)])
def test_windows_of_a_text_leave_no_gap(start, stop):
    assert window_stops(start, stop).tolist() == [n for n in range(start + 1, stop + 1) if n % 32 == 0]

"""Windows found at every place: none missed, none believed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.reuse import RULES, ContentIndex, CutRule, Media, Prompt, Scope
from kamera.reuse.gear import gear
from kamera.reuse.scan import Scan

SCOPE = Scope("model", "tokenizer")
RULE = RULES["scan"]


def text(seed: int, count: int, alphabet: int = 30_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, alphabet, count).astype(np.uint32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(31, 400), st.integers(0, 700))
def test_a_moved_region_is_found_but_for_its_edges(seed, size, shift):
    region = text(seed, size)
    index = ContentIndex(SCOPE, RULE)
    index.add(Prompt.of(np.concatenate([text(seed + 1, 321), region, text(seed + 2, 100)])))
    asked = np.concatenate([text(seed + 3, shift), region, text(seed + 4, 50)])
    found = index.find(Prompt.of(asked))
    assert all(shift <= h.start < h.stop <= shift + size for h in found.hits)
    assert all(index.content(h.segment).ids == Prompt.of(asked[h.start : h.stop]).raw for h in found.hits)
    if size > 64:  # a whole window of any alignment, and all between the first and the last
        inside = sorted((h.start - shift, h.stop - shift) for h in found.hits)
        assert inside[0][0] < 32
        assert inside[-1][1] > size - 64


def test_hits_of_a_scan_never_overlap():
    region = np.tile(text(0, 40), 20)
    index = ContentIndex(SCOPE, RULE)
    index.add(Prompt.of(region))
    hits = index.find(Prompt.of(np.concatenate([text(1, 7), region]))).hits
    assert len(hits) > 10
    assert all(a.stop <= b.start for a, b in itertools.pairwise(hits))


def test_a_scan_finds_nothing_in_a_picture():
    ids = text(0, 300)
    index = ContentIndex(SCOPE, RULE)
    index.add(Prompt.of(ids))
    asked = Prompt.of(np.concatenate([text(1, 9), ids]), media=[Media(50, 250, "red")])
    hits = index.find(asked).hits
    assert hits
    assert not any(h.start < 250 and h.stop > 50 for h in hits)


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
    starts = np.arange(0, 40_000 - 32, 32)
    for block in blocks:
        scan.add(block, starts)
    for block in blocks:
        assert set(starts) <= set(scan.candidates(block))
    assert len(scan.candidates(text(9, 40_000))) < 2_000  # about one in 64
    assert len(scan.candidates(text(9, 31))) == 0


def test_a_scan_of_other_windows_is_a_value_error():
    with pytest.raises(ValueError, match="32 tokens, not 128"):
        CutRule(scan=True, sub_window=128)

"""Windows found at every place: none missed, none believed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import gear
from kamera.reuse import RULES, ContentIndex, Prompt


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


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3_000), st.sampled_from([3, 30_000]))
def test_the_hash_behind_each_token_sees_32_tokens(seed, count, alphabet):
    ids = text(seed, count, alphabet)
    hashes = gear(ids)
    for place in range(31, count, 97):
        alone = gear(ids[place - 31 : place + 1])[-1]
        assert hashes[place] == alone

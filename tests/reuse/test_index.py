"""The index finds what brute force finds, and believes no hash."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.reuse import ContentIndex, CutRule, Media, Prompt, fixed_cuts

SMALL = CutRule(minimum=8, maximum=64, exponent=4, bits="low")


def text(seed: int, count: int, alphabet: int = 30_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, alphabet, count)


def index_of(*prompts: Prompt, rule: CutRule = SMALL) -> ContentIndex:
    made = ContentIndex(rule)
    for prompt in prompts:
        made.add(prompt)
    return made


def recombined(seed: int) -> Prompt:
    """Passages of a few in some order, with a mutation here and there, and anchors at some joints."""
    draw = np.random.default_rng(seed)
    parts, anchors, at = [], [], 0
    for _ in range(draw.integers(0, 6)):
        passage = text(draw.integers(0, 5), draw.integers(1, 200), alphabet=50).copy()
        if draw.random() < 0.3:
            passage[draw.integers(0, passage.size)] += 1
        if draw.random() < 0.5:
            anchors.append(at)
        parts.append(passage)
        at += passage.size
    return Prompt.of(np.concatenate([np.zeros(0, int), *parts]), anchors=anchors)


def common(a: np.ndarray, b: np.ndarray) -> int:
    count = min(a.size, b.size)
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def longest(asked: np.ndarray, start: int, stored: list[bytes]) -> int:
    """The most tokens from ``start`` on that some stored prompt has, by trying every length."""
    count = 0
    while start + count < len(asked):
        piece = Prompt.of(asked[start : start + count + 1]).raw
        if not any(is_in(piece, raw) for raw in stored):
            break
        count += 1
    return count


def is_in(piece: bytes, raw: bytes) -> bool:
    at = raw.find(piece)
    while at >= 0 and at % 4:
        at = raw.find(piece, at + 1)
    return at >= 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 10**6))
def test_index_equals_brute_force(seeds, seed):
    before = [recombined(s) for s in seeds]
    asked = recombined(seed)
    index = index_of(*before)
    found = index.find(asked)
    assert found.prefix == max(common(b.ids, asked.ids) for b in before)
    assert (found.cuts[0], found.cuts[-1]) == (0, len(asked))
    assert list(found.cuts) == sorted(set(found.cuts))
    assert set(fixed_cuts(asked, SMALL)) <= set(found.cuts)
    for hit in found.hits:
        content = index.content(hit.segment)
        assert asked.slice(hit.start, hit.stop) == content.ids[4 * hit.offset :][: 4 * (hit.stop - hit.start)]
    assert all(a.stop <= b.start for a, b in itertools.pairwise(found.hits))
    inside = {at for hit in found.hits for at in range(hit.start, hit.stop)} | {*range(found.prefix)}
    stored = [b.raw for b in before]
    for start in range(found.prefix, len(asked), 13):  # wherever brute force finds 63 tokens, the index does
        count = longest(asked.ids, start, stored)
        if count >= 63:
            assert set(range(start, start + count)) <= inside
    whole = {
        hit[:2] for hit in found.hits if 4 * (hit.stop - hit.start) == len(index.content(hit.segment).ids)
    }
    assert whole <= set(itertools.pairwise(found.cuts))  # what came before comes again as the same segment


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12), st.integers(20_000, 120_000))
def test_a_full_index_evicts_what_was_used_longest_ago(seeds, limit):
    prompts = [recombined(s) for s in seeds]
    index, free = ContentIndex(SMALL, limit=limit + 65_536), index_of()
    for prompt in prompts:
        for one in (index, free):
            found = one.find(prompt)
            one.add(prompt, found.cuts)
            one.find(prompt)
        assert index.nbytes <= limit + 65_536
    assert index.evicted or index.nbytes == free.nbytes
    if not index.evicted:
        assert [index.find(p) for p in prompts] == [free.find(p) for p in prompts]
    for prompt in prompts:  # less is found, never something else
        found = index.find(prompt)
        assert found.prefix <= free.find(prompt).prefix
        for hit in found.hits:
            there = index.content(hit.segment).ids[4 * hit.offset :]
            assert there.startswith(prompt.slice(hit.start, hit.stop))


def test_a_forced_hash_collision_is_a_miss(monkeypatch):
    monkeypatch.setattr("kamera.reuse.index.content_key", lambda content: b"\0" * 16)
    one, other = Prompt.of(text(1, 300)), Prompt.of(text(2, 300))
    index = index_of(one)
    assert index.find(other) == index_of().find(other)
    index.add(other)
    for prompt in (one, other):
        found = index.find(prompt)
        assert found.prefix == 300
    moved = Prompt.of(np.concatenate([text(3, 40), other.ids]), anchors=[40])
    hits = index.find(moved).hits
    assert hits
    assert all(index.content(h.segment).ids == moved.slice(h.start, h.stop) for h in hits)


def test_the_same_placeholders_for_another_picture_are_a_miss():
    ids = np.concatenate([text(1, 100), np.full(300, 7), text(2, 100)])

    def screen(digest: str) -> Prompt:
        return Prompt.of(ids, media=[Media(100, 400, digest)], placeholders={7})

    index = index_of(screen("red"))
    assert index.find(screen("red")).prefix == 500
    found = index.find(screen("blue"))
    assert found.prefix == 100
    assert not any(h.start < 400 and h.stop > 100 for h in found.hits)
    moved = Prompt.of(ids[50:], media=[Media(50, 350, "red")])
    assert (50, 350) in {(h.start, h.stop) for h in index.find(moved).hits}

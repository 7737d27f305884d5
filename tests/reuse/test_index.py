"""The index finds what brute force finds, and believes no hash."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.reuse import RULES, ContentIndex, CutRule, Media, Prompt, Scope, cut, segment_key, table

SCOPE = Scope("model", "tokenizer")
SMALL = CutRule(minimum=8, maximum=64, exponent=4, bits="low")


def text(seed: int, count: int, alphabet: int = 30_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, alphabet, count)


def index_of(*prompts: Prompt, rule: CutRule = SMALL) -> ContentIndex:
    made = ContentIndex(SCOPE, rule)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 10**6))
def test_index_equals_brute_force(seeds, seed):
    before = [recombined(s) for s in seeds]
    asked = recombined(seed)
    rule = CutRule(minimum=8, maximum=64, exponent=4, bits="low", sub_window=16, windows=(24, 8))
    found = index_of(*before, rule=rule).find(asked)

    longest = max(common(b.ids, asked.ids) for b in before)
    assert longest - 15 <= found.prefix <= longest
    seen = set()
    for prompt in before:
        cuts = cut(prompt, rule)
        seen |= {prompt.slice(a, b) for a, b in itertools.pairwise(cuts)}
    cuts = cut(asked, rule)
    expected = {(a, b) for a, b in itertools.pairwise(cuts) if b > found.prefix}
    expected = {(a, b) for a, b in expected if asked.slice(a, b) in seen}
    hits = {(hit.start, hit.stop) for hit in found.hits}
    assert expected <= hits
    stored = b"".join(b.raw for b in before)
    assert all(asked.slice(a, b) in stored for a, b in hits)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_prompt_seen_before_is_all_prefix(seed):
    prompt = recombined(seed)
    index = index_of(recombined(seed + 1), prompt)
    assert index.find(prompt).prefix == len(prompt)
    assert index.add(prompt) == 0


def test_a_moved_region_is_found_where_cuts_meet():
    region = text(1, 3_000)
    index = index_of(Prompt.of(np.concatenate([text(2, 500), region])), rule=RULES["low"])
    found = index.find(Prompt.of(np.concatenate([text(3, 777), region])))
    assert found.prefix == 0
    assert sum(hit.stop - hit.start for hit in found.hits) > 2_000
    assert all(hit.start >= 777 for hit in found.hits)


def test_sub_windows_are_found_where_the_segment_is_not():
    stored = text(1, 500)
    edited = stored.copy()
    edited[450:] += 1
    rule = CutRule("fixed", 512, 512, sub_window=128, anchors=False)
    shifted = np.concatenate([text(9, 512), edited])
    found = index_of(Prompt.of(stored), rule=rule).find(Prompt.of(shifted))
    assert [(h.start, h.stop) for h in found.hits] == [(512, 640), (640, 768), (768, 896)]


def test_a_forced_hash_collision_is_a_miss(monkeypatch):
    monkeypatch.setattr(table, "identity", lambda content, seed: b"\0" * 16)
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


def test_text_never_matches_into_a_picture():
    ids = text(1, 400)
    index = index_of(Prompt.of(ids))
    asked = Prompt.of(ids, media=[Media(100, 300, "red")])
    found = index.find(asked)
    assert found.prefix == 100
    assert not any(h.start < 300 and h.stop > 100 for h in found.hits)


def test_scopes_share_no_key_and_no_hash():
    content = table.Content(b"\1\0\0\0" * 40)
    scopes = [SCOPE, Scope("other", "tokenizer"), Scope("model", "other"), Scope("model", "tokenizer", "t")]
    assert len({segment_key(scope, *content) for scope in scopes}) == 4
    assert len({table.identity(content, int(scope.digest[:16], 16)) for scope in scopes}) == 4
    assert segment_key(Scope("a", "bc"), b"") != segment_key(Scope("ab", "c"), b"")
    assert segment_key(SCOPE, content.ids) != segment_key(SCOPE, content.ids, "red")


def test_find_changes_nothing():
    index = index_of(Prompt.of(text(1, 900)))
    known = len(index)
    asked = Prompt.of(text(2, 900))
    assert index.find(asked) == index.find(asked)
    assert len(index) == known


def test_a_record_behind_an_unknown_node_is_refused():
    record = index_of(Prompt.of(text(1, 900))).record_of(
        Prompt.of(np.concatenate([text(1, 900), text(2, 90)]))
    )
    assert record.node > 0
    with pytest.raises(ValueError, match=f"node {record.node}"):
        index_of().apply(record)

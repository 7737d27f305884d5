"""Cuts: equal to the plain reference, a partition, clamped, and the same after an edit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import Conversations
from kamera.reuse import RULES, CutRule, Media, Prompt, Span, anchors_of, cut_prompt
from tests.content import templates
from tests.reuse.plain_cuts import plain_cuts

SMALL = CutRule(minimum=8, maximum=64, exponent=4, bits="low")
RULES_UNDER_TEST = [
    SMALL,
    CutRule(minimum=32, maximum=96, exponent=4, bits="high"),
    CutRule(exponent=5),
    CutRule(exponent=5, bits="low"),
    CutRule("fixed", 16, 16),
]

prompts = st.builds(
    lambda seed, count, alphabet: np.random.default_rng(seed).integers(0, alphabet, count),
    st.integers(0, 2**32 - 1),
    st.integers(0, 1500),
    st.sampled_from([2, 40, 150_000, 2**32 - 1]),
)


def text(seed: int, count: int, alphabet: int = 30_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, alphabet, count)


@settings(max_examples=60, deadline=None)
@given(prompts, st.sampled_from(RULES_UNDER_TEST), st.lists(st.integers(0, 1500), max_size=4))
def test_all_at_once_equals_one_after_the_other(ids, rule, places):
    anchors = sorted({p for p in places if p <= len(ids)})
    fast = cut_prompt(Prompt.of(ids, anchors=anchors), rule)
    if rule.kind == "content":
        slow = plain_cuts(
            ids.tolist(),
            minimum=rule.minimum,
            maximum=rule.maximum,
            exponent=rule.exponent,
            bits=rule.bits,
            resets=anchors,
        )
        assert fast == slow
    edges = sorted({0, len(ids), *anchors})
    assert set(edges) <= set(fast)
    assert fast == sorted(set(fast))


@settings(max_examples=40, deadline=None)
@given(prompts, st.sampled_from(RULES_UNDER_TEST))
def test_segments_are_the_text_and_within_the_clamp(ids, rule):
    prompt = Prompt.of(ids)
    cuts = cut_prompt(prompt, rule)
    pieces = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate([ids[:0], *pieces]), ids)
    lengths = np.diff(cuts)
    assert all(lengths <= rule.maximum)
    assert all(lengths[:-1] >= rule.minimum)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.sampled_from([RULES["low"], RULES["high"], SMALL]),
)
def test_cuts_meet_again_behind_an_edit(seed, inserted, rule):
    body = text(seed, 8_000)
    edited = np.concatenate([text(seed + 1, inserted), body])
    before = set(cut_prompt(Prompt.of(body), rule))
    after = {c - inserted for c in cut_prompt(Prompt.of(edited), rule)}
    met = min(before & after & set(range(body.size + 1)) - {0})
    assert met < 6_000  # within a few segments, not at the end only
    assert {c for c in before if c >= met} == {c for c in after if c >= met}


def test_a_picture_is_one_segment_and_is_never_cut():
    ids = np.concatenate([text(1, 700), np.full(1_500, 151_655), text(2, 700)])
    prompt = Prompt.of(
        ids,
        anchors=[900],
        media=[Media(700, 2_200, "a" * 64)],
        spans=[Span(1_000, 1_100, "inside")],
        placeholders={151_655},
    )
    for rule in RULES.values():
        cuts = cut_prompt(prompt, rule)
        assert (700, 2_200) in itertools.pairwise(cuts)


@pytest.mark.parametrize("header", [0, 45])
def test_a_conversation_and_its_tokens_are_cut_alike(header):
    """One cutter: what a session's segments are, the same tokens' segments are, wherever they stand."""
    draw = random.Random(7)
    text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz  ", k=1_500))
    before = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=header))
    processor = templates.speaker("headers")
    rendered = Conversations(processor).render([{"role": "user", "content": before + text}])
    ids = rendered.ids[: rendered.stable]
    stops = [segment.stop for segment in rendered.segments]
    assert cut_prompt(Prompt.of(ids.numpy(), anchors=anchors_of(processor, ids)), RULES["anchors"]) == [
        0,
        *stops,
    ]
    alone = Conversations(processor).render([{"role": "user", "content": text}])
    assert len(stops) > 8 and len({s.id for s in alone.segments} & {*rendered.segment_ids()}) > 6

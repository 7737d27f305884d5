"""Cuts: equal to the plain reference, a partition, clamped, and the same after an edit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import Conversations
from kamera.errors import UnidentifiedMedia
from kamera.reuse import RULES, CutRule, Media, Prompt, Span, anchors_of, cut_prompt
from lab.plain_cuts import plain_cuts
from tests.content import templates

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


def test_blocks_of_the_vectorised_hash_leave_no_seam():
    ids = text(3, 40_000)  # more than two blocks
    assert cut_prompt(Prompt.of(ids), SMALL) == plain_cuts(
        ids.tolist(), minimum=8, maximum=64, exponent=4, bits="low"
    )


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


def test_a_reset_makes_cuts_forget_what_stands_before():
    body = text(0, 3_000)
    alone = cut_prompt(Prompt.of(body), RULES["anchors"])
    for seed, length in ((1, 1), (2, 77), (3, 1_900)):
        head = text(seed, length)
        prompt = Prompt.of(np.concatenate([head, body, head]), anchors=[length, length + 3_000])
        cuts = cut_prompt(prompt, RULES["anchors"])
        inside = [c - length for c in cuts if length <= c <= length + 3_000]
        assert inside == alone


def test_a_marker_is_a_reset_at_both_its_ends():
    marker = (7, 8, 7, 9)
    ids = np.concatenate([text(1, 50, 5) + 100, marker, text(2, 60, 5) + 100, marker, text(3, 9, 5) + 100])
    cuts = cut_prompt(Prompt.of(ids), CutRule(marker=marker))
    assert {50, 54, 114, 118} <= set(cuts)
    assert cut_prompt(Prompt.of(ids), CutRule()) != cuts


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


def test_a_run_of_equal_tokens_is_not_cut_by_content():
    for token in range(64):  # whatever its hash: some of these would cut at every place
        assert cut_prompt(Prompt.of(np.full(1_000, token)), CutRule(exponent=2)) == [0, 512, 1_000]


def test_given_spans_are_resets_where_the_rule_asks():
    prompt = Prompt.of(text(5, 400), spans=[Span(33, 290, "tools")])
    assert {33, 290} <= set(cut_prompt(prompt, CutRule()))
    assert not {33, 290} <= set(cut_prompt(prompt, RULES["low"]))


def test_a_kept_span_is_a_segment_as_it_is():
    prompt = Prompt.of(text(1, 2_000))
    kept = [(100, 150), (150, 1_300)]
    cuts = cut_prompt(prompt, CutRule(), kept)
    assert set(kept) <= set(itertools.pairwise(cuts))
    behind = cut_prompt(Prompt.of(prompt.ids[1_300:]), CutRule())
    assert [c - 1_300 for c in cuts if c >= 1_300] == behind


def test_the_empty_prompt_has_one_boundary():
    assert [cut_prompt(Prompt.of([]), rule) for rule in RULES.values()] == [[0]] * len(RULES)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: Prompt.of([1.5]), "integers"),
        (lambda: Prompt.of([[1, 2]]), "integers"),
        (lambda: Prompt.of([-1]), "-1"),
        (lambda: Prompt.of([2**32]), "4294967296"),
        (lambda: Prompt.of([1, 2], anchors=[3]), "anchor 3"),
        (lambda: Prompt.of([1, 2], media=[Media(1, 3, "d")]), "2 tokens"),
        (lambda: Prompt.of([1, 2], spans=[Span(1, 1)]), "2 tokens"),
        (lambda: Prompt.of([1, 2, 3], media=[Media(0, 2, "d"), Media(1, 3, "e")]), "overlap"),
        (lambda: CutRule(minimum=0), "minimum 0"),
        (lambda: CutRule(minimum=31, bits="high"), "minimum 31"),
        (lambda: CutRule(minimum=6, bits="low"), "minimum 6"),
        (lambda: cut_prompt(Prompt.of([1]), CutRule(exponent=17, minimum=32)), "17"),
    ],
)
def test_what_cannot_be_cut_is_a_value_error(made, named):
    with pytest.raises(ValueError, match=r"must|not within|overlap|less") as refused:
        made()
    assert named in str(refused.value)


def test_placeholders_without_a_digest_are_refused_by_name():
    with pytest.raises(UnidentifiedMedia, match="token 9 at 2"):
        Prompt.of([1, 9, 9, 4], media=[Media(1, 2, "d")], placeholders={9})
    with pytest.raises(UnidentifiedMedia, match="no digest"):
        Prompt.of([1, 9], media=[Media(1, 2, "")])


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

"""Answers in the forward of the new chunks, and their KV taken over by the next text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kamera import Chunk, KameraWindow, ReusePolicy
from kamera.window import Arrange, former_of, respond
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import (
    GREEDY,
    QUESTION,
    Prefilled,
    Snapshot,
    distance,
    guarantees,
    make,
    rig,
    watching,
)

ROUNDING = 1e-4
EXACT = ReusePolicy(minimum="exact", on_miss="prefill")
NEW = 4
OPTIONS = {**GREEDY, "max_new_tokens": NEW, "min_new_tokens": NEW}
FAMILIES = tuple(family for family in (*tiny.FAMILIES, *tiny.LIMITED) if family != "unknown")


def said_by(window: KameraWindow) -> Chunk:
    """The question, the answer, and two tokens more, as the next text."""
    said = window._state.said.encoded.input_ids
    return former_of(window).backbone.chunk_from_tensors(
        torch.cat([said, torch.tensor([21, 22])]), label="said"
    )


def off(window: KameraWindow, chunks: list[Chunk]) -> float:
    """Largest relative error of a window's KV and logits against the plain model over the same tokens."""
    plain = Prefilled(former_of(window).backbone, chunks)
    logits = relative(window.next_token_logits(QUESTION), plain.logits)
    return max([logits, *(distance(window, i, plain) for i in range(len(chunks)))])


@pytest.mark.few(1)
@pytest.mark.parametrize("family", tiny.of_each_kind(FAMILIES))
def test_question_and_new_chunks_of_any_family_share_a_forward_and_equal_the_plain_model(family):
    backbone, chunks = rig(family)
    window = make(backbone, policy=EXACT)
    with watching(backbone) as seen:
        answer, report = respond(window, QUESTION, Arrange(chunks[:3]), **OPTIONS)
    plain = Prefilled(backbone, chunks[:3])
    assert answer.tolist() == plain.generate(**OPTIONS)[0].tolist()
    assert seen.forwards == report.forwards + NEW - (1 if backbone.facts.joins else 0)
    assert report.tokens_recomputed == sum(c.num_tokens for c in chunks[:3])
    assert off(window, chunks[:3]) <= ROUNDING
    assert report.forwards == 1 or not backbone.facts.joins

    text = said_by(window)
    following = [text, chunks[3]]
    with watching(backbone) as seen:
        answer, report = respond(window, QUESTION, Arrange([*window.slots, *following]), **OPTIONS)
    rest = text.num_tokens - (len(QUESTION) + NEW - 1) + chunks[3].num_tokens
    assert report.tokens_recomputed == rest
    assert sum(seen.spans) == rest + len(QUESTION) + NEW - 1
    assert answer.tolist() == Prefilled(backbone, [*chunks[:3], *following]).generate(**OPTIONS)[0].tolist()
    assert off(window, [*chunks[:3], *following]) <= ROUNDING
    assert set(guarantees(window)) == {"exact"}


def test_an_answer_that_breaks_off_leaves_the_window_as_it_was():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, chunks[0], policy=EXACT)
    before = Snapshot.of(window)

    class Torn:
        def __init__(self):
            self.puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 3:
                raise OSError("the client is gone, says the test")

        def end(self):
            pass

    with pytest.raises(OSError, match="the client is gone"):
        respond(window, QUESTION, Arrange([*window.slots, *chunks[1:]]), streamer=Torn(), **OPTIONS)
    assert before.matches(window)
    answer, _ = respond(window, QUESTION, Arrange([*window.slots, *chunks[1:]]), **OPTIONS)
    assert answer.tolist() == Prefilled(backbone, chunks).generate(**OPTIONS)[0].tolist()


@pytest.mark.parametrize("change", ["slide", "reorder", "evict", "append", "condition"])
def test_what_was_said_counts_only_behind_the_very_same_chunks(change):
    backbone, chunks = rig("llama_mqa")
    window = make(backbone, policy=EXACT if change != "condition" else None)
    respond(window, QUESTION, Arrange(chunks[:3]), **OPTIONS)
    text = said_by(window)
    given = {
        "slide": (),
        "reorder": ([2, 1, 0],),
        "evict": (1,),
        "append": (chunks[3],),
        "condition": (1, False),
    }
    getattr(window, change)(*given[change])
    assert window._state.said is None
    report = window.append(text)
    assert report.tokens_recomputed >= text.num_tokens
    if change != "condition":
        known = {c.id: c for c in (*chunks, text)}
        assert off(window, [known[slot.chunk_id] for slot in window.slots]) <= ROUNDING


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_turns_and_edits_equal_a_reprefill(data):
    """Questions, their answers as texts (whole, cut short, changed), new texts and departures by chance."""
    backbone, chunks = rig("llama_mqa", 5)
    window = make(backbone, policy=EXACT)
    texts: list[Chunk] = list(chunks)
    order: list[Chunk] = []
    for _ in range(5):
        said = window._state.said
        if said is not None and data.draw(st.booleans()):
            ids = said.encoded.input_ids
            kept = ids[: data.draw(st.integers(1, len(ids)))]
            more = samples.text_ids(data.draw(st.integers(0, 3)), seed=data.draw(st.integers(1, 9)))
            order = [*order, backbone.chunk_from_tensors(torch.cat([kept, more]))]
            texts.append(order[-1])
        if len(order) > 1 and data.draw(st.booleans()):
            order.pop(data.draw(st.integers(0, len(order) - 1)))
        if not order or data.draw(st.booleans()):
            order = [*order, texts[data.draw(st.integers(0, len(texts) - 1))]]
        held = {}
        for slot in reversed(window.slots):
            held[slot.chunk_id] = slot
        given_ = [held.pop(c.id, c) for c in order]
        planned = window.plan(Arrange(given_))
        question = samples.text_ids(data.draw(st.integers(1, 3)), seed=data.draw(st.integers(20, 23)))
        answer, report = respond(window, question, Arrange(given_), **OPTIONS)
        assert (report.forwards, report.tokens_recomputed) == (planned.cost.forwards, planned.cost.tokens)
        plain = Prefilled(backbone, order, question)
        assert answer.tolist() == plain.generate(**OPTIONS)[0].tolist()
        assert off(window, order) <= ROUNDING

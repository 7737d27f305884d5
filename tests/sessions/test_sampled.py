"""Conversations that lose pictures nobody foresaw: what stays is sampled, and no other one sees it."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool
from kamera.edits import policies
from kamera.window import GLUE, SHORTEST_KEPT
from tests.window.rig import borne, watching

POLICY = ReusePolicy(minimum="sampled", share=0.25, max_error=1.0, certified=False)
OPTIONS = {"max_new_tokens": 2, "do_sample": False}


def shown(picture) -> dict:
    text = {"type": "text", "text": "What is the value of tag 3?"}
    return {"role": "user", "content": [{"type": "image", "image": picture}, text]}


@pytest.mark.parametrize("policy", [POLICY, ReusePolicy.exact()], ids=["sampled", "exact"])
def test_a_departure_runs_a_quarter_of_the_pictures_that_stay(backbone, frames, policy):
    exact = policy.minimum == "exact"
    chat = ChatSession(
        backbone,
        ChunkStore.open("memory://"),
        policy=policy,
        mode="forget" if exact else "repair",
        edit_policy=policies.keep_last_images(2),
    )
    history: list[dict] = []
    for picture in frames[:2]:
        history += [shown(picture)]
        history += said(chat.send(history, **OPTIONS).text)
    with watching(backbone) as seen:
        turn = chat.send([*history, shown(frames[2])], **OPTIONS)
    report = turn.report
    assert report.kept + report.turned + report.patched + report.sampled + report.prefilled == (
        turn.usage.prompt_tokens
    )
    assert sum(seen.spans[: -(OPTIONS["max_new_tokens"] - 1)]) == report.prefilled
    pictures = [slot for slot in chat.window.slots if slot.guarantee == "sampled"]
    ran = sum(round(slot.share * slot.length) for slot in pictures)
    assert report.sampled == sum(slot.length for slot in pictures) - ran
    assert (len(pictures), report.sampled > 0) == ((0, False) if exact else (1, True))
    assert len(seen.spans) - (OPTIONS["max_new_tokens"] - 1) <= 2, "one for the samples, one for the answer"


@pytest.mark.parametrize("reuse", [False, True], ids=["joined", "apart"])
def test_texts_between_pictures_that_stay_run_half_of_their_tokens(backbone, frames, reuse):
    words = {"type": "text", "text": "value of tag 3? " * 3}
    chat = ChatSession(
        backbone,
        ChunkStore.open("memory://"),
        policy=POLICY,
        mode="repair",
        edit_policy=policies.keep_last_images(2),
        reuse=reuse,
    )
    history: list[dict] = []
    for picture in frames[:4]:
        item = shown(picture)
        history += [{**item, "content": [*item["content"], words]}]
        with watching(backbone) as seen:
            turn = chat.send(history, **OPTIONS)
        history += said(turn.text)
    sampled = [s for s in chat.window.slots if s.guarantee == "sampled"]
    assert all(s.length >= SHORTEST_KEPT for s in sampled)
    glue = [s for s in sampled if s.length < GLUE and s.share > 0.3]
    assert len(glue) >= 2 and all(s.share == round(0.5 * s.length) / s.length for s in glue)
    assert sum(seen.spans[: -(OPTIONS["max_new_tokens"] - 1)]) == turn.report.prefilled
    assert not turn.report.notes, "a short text that is refused is no news"


def test_what_a_conversation_sampled_no_other_goes_on_from(backbone, frames):
    pool = SessionPool(
        backbone,
        ChunkStore.open("memory://"),
        policy=POLICY,
        mode="repair",
        edit_policy=policies.keep_last_images(1),
    )
    with watching(backbone, later=True) as seen:
        first = pool.send([shown(frames[0]), *said("a"), shown(frames[1])], **OPTIONS)
        history = [shown(frames[0]), *said("a"), shown(frames[1]), *said(first.text), shown(frames[2])]
        again = pool.send(history, session_id=first.session_id, **OPTIONS)
        assert again.report.guarantee in ("sampled", "exact", "patched")
        other = pool.send(history, **OPTIONS)
        pool.flush()
    if "sampled" in [slot.guarantee for slot in pool.session(first.session_id).window.slots]:
        assert other.session_id != first.session_id
    assert borne(seen, pool.usage())


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]

"""A session answers as an uncached run of its whole conversation would, whatever was edited."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.edits import policies
from kamera.errors import EditPolicyFailed, ModalityNotSupported, WindowFull
from kamera.sessions import ChatSession
from kamera.window import former_of
from tests.content.templates import LONG_TALK, TALK, picture, screens
from tests.engines.compare import relative
from tests.sessions.rig import FULL, plain_logits, seeing, session, speaking

CLOSE = 1e-4
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def apart(chat: ChatSession, messages, tools=None) -> float:
    """How far its next-token logits are from those of the plain model over the whole prompt."""
    return relative(chat.next_token_logits(messages), plain_logits(chat.backbone, messages, tools))


@pytest.mark.few(2)
@pytest.mark.parametrize("style", ["thinking", "headers", "turns", "instructions", "plain"])
def test_a_growing_conversation_answers_as_an_uncached_one(style):
    chat = session(speaking(style))
    for stop in range(1, len(LONG_TALK) + 1, 2):
        assert apart(chat, LONG_TALK[:stop]) <= CLOSE
    assert chat.window is not None and {slot.guarantee for slot in chat.window.slots} == {"exact"}


def test_pictures_that_leave_the_history_leave_no_trace():
    chat = session(seeing())
    assert apart(chat, screens(4)) <= CLOSE
    edited = policies.keep_last_images(1)(screens(5), 0)
    assert apart(chat, edited) <= CLOSE


@settings(max_examples=8)
@given(st.data())
def test_any_edited_history_answers_as_an_uncached_one(data):
    chat = session(seeing())
    history = screens(2)
    for turn in range(3):
        for _ in range(data.draw(st.integers(1, 2))):
            kind = data.draw(st.sampled_from(["drop", "add", "replace", "swap"]))
            at = data.draw(st.integers(1, len(history) - 1))
            new = {"role": "user", "content": [{"type": "image", "image": picture(10 * turn + at)}]}
            if kind == "drop" and len(history) > 3:
                del history[at]
            elif kind == "swap" and at + 1 < len(history):
                history[at], history[at + 1] = history[at + 1], history[at]
            elif kind == "replace":
                history[at] = {"role": "user", "content": f"word {turn} {at}"}
            else:
                history.insert(at, new)
        assert apart(chat, history) <= CLOSE


@pytest.mark.few(1)
@pytest.mark.parametrize("style", ["instructions", "headers", "seeing"])
def test_a_history_cut_back_to_an_answer_runs_it_once(style):
    """Under "instructions" nothing is written behind an answer: its last tokens are the question."""
    chat = session(seeing() if style == "seeing" else speaking(style))
    history = [*LONG_TALK, {"role": "assistant", "content": "It is."}]
    for stop in (5, 4, 6, 2, 5, 3, 1, 4, 6):
        assert apart(chat, history[:stop]) <= CLOSE


def test_repair_with_full_rank_patches_equals_an_uncached_run():
    chat = session(seeing(), FULL, mode="repair")
    for messages in (screens(3), policies.keep_last_images(1)(screens(3), 0)):
        wanted = plain_logits(chat.backbone, messages)
        assert relative(chat.next_token_logits(messages), wanted) <= 1e-3


def test_amortize_keeps_what_survivors_absorbed_and_says_so():
    chat = session(seeing(), FULL, mode="amortize")
    chat.next_token_logits(screens(3))
    edited = policies.keep_last_images(2)(screens(3), 0)
    logits = chat.next_token_logits(edited)
    assert chat.window is not None and "survivor" in {s.guarantee for s in chat.window.slots}
    assert relative(logits, plain_logits(chat.backbone, edited)) > CLOSE


def test_amortize_relocates_survivors_and_prefills_none():
    chat = session(seeing(), FULL, mode="amortize")
    before = chat.send(screens(3), **GREEDY).report
    edited = policies.keep_last_images(2)(screens(3), 0)
    after = chat.send(edited, **GREEDY).report
    question = (
        len(chat.prompt_ids) - sum(s.length for s in chat.window.slots) - former_of(chat.window).anchor.length
    )
    assert before.vision_encodes == 3 and after.vision_encodes == 0
    assert after.forwards == 0 and after.left > 20 and after.prefilled == question


def test_an_appended_turn_prefills_only_what_is_new():
    chat = session(seeing())
    chat.next_token_logits(screens(2))
    old = {s.chunk_id for s in chat.window.slots}
    chat.send(screens(3), **GREEDY)
    kept = [s for s in chat.window.slots if s.chunk_id in old]
    report = chat.send("go on", **GREEDY).report
    assert report.kept >= sum(s.length for s in kept) and report.turned == report.patched == 0
    assert report.vision_encodes == 0


def test_every_prompt_token_is_counted_once():
    chat = session(seeing(), FULL, mode="repair")
    for messages in (screens(3), policies.keep_last_images(2)(screens(4), 0), screens(1)):
        report = chat.send(messages, **GREEDY).report
        total = report.kept + report.turned + report.patched + report.prefilled
        assert total == chat.prompt_ids.shape[0] and min(report.prefilled, report.left) >= 0


@pytest.mark.parametrize("wrong", ["role", "media", "policy", "room"])
def test_after_an_error_the_session_is_as_it_was(wrong):
    def throws(messages, turn):
        raise RuntimeError("no")

    backbone = speaking("turns")
    chat = session(backbone, max_tokens=400, edit_policy=throws if wrong == "policy" else None)
    if wrong == "policy":
        with pytest.raises(EditPolicyFailed):
            chat.send(TALK[:1])
        assert chat.messages == [] and chat.window is None
        return
    chat.send(TALK[:1], **GREEDY)
    before, ids, slots = chat.messages, chat.prompt_ids, chat.window.slots
    bad = {
        "role": {"role": "system", "content": "x"},
        "media": screens(1)[1],
        "room": {"role": "user", "content": "word " * 500},
    }[wrong]
    with pytest.raises((ModalityNotSupported, WindowFull)):
        chat.send(bad, **GREEDY)
    assert chat.messages == before and torch.equal(chat.prompt_ids, ids) and chat.window.slots == slots
    assert apart(chat, [*before, TALK[2]]) <= CLOSE


@settings(max_examples=5)
@given(st.data())
def test_random_turns_of_the_exact_mode_never_diverge(data):
    style = data.draw(st.sampled_from(["seeing", "thinking", "headers", "turns", "instructions", "plain"]))
    chat = session(seeing() if style == "seeing" else speaking(style))
    said = st.text("ab c\n.", min_size=1, max_size=60).map(str.strip).filter(bool)
    history = [{"role": "user", "content": data.draw(said)}]
    for _ in range(data.draw(st.integers(1, 4))):
        edit, at = (
            data.draw(st.sampled_from(["turn", "rewrite", "drop", "cut"])),
            data.draw(st.integers(0, len(history) - 1)),
        )
        if edit == "turn":
            history += [{"role": "assistant", "content": data.draw(said)}]
            history += [{"role": "user", "content": data.draw(said)}]
        elif edit == "rewrite":
            history[at] = {**history[at], "content": data.draw(said)}
        elif edit == "cut":
            del history[at + 1 :]
        elif len(history) > 2:
            del history[at - at % 2 : at - at % 2 + 2]
        assert apart(chat, history) <= CLOSE

"""A session answers as an uncached run of its whole conversation would, whatever was edited."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.errors import EditPolicyFailed, ModalityNotSupported, ProcessorRequired, WindowFull
from kamera.sessions import ChatSession, SessionPool
from kamera.window import former_of
from tests.content.habits import BEGIN, END, ITEMS
from tests.content.templates import AGENT, LONG_TALK, TALK, TOOLS, picture, screens
from tests.engines.compare import relative
from tests.models import processors, tiny
from tests.sessions.rig import EXACT, FULL, plain_logits, seeing, session, speaking

CLOSE = 1e-4
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def apart(chat: ChatSession, messages, tools=None) -> float:
    """How far its next-token logits are from those of the plain model over the whole prompt."""
    return relative(chat.next_token_logits(messages), plain_logits(chat.backbone, messages, tools))


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


def test_rewritten_thinking_and_merged_tool_results_agree():
    chat = session(speaking("thinking"), tools=TOOLS)
    for stop in (1, 4, 6):
        assert apart(chat, AGENT[:stop], TOOLS) <= CLOSE


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


@pytest.mark.parametrize("mode", ["amortize", "repair"])
def test_a_text_added_to_a_turn_is_one_forward_with_its_closing_tag(mode):
    chat = session(seeing(), FULL, mode=mode)
    chat.next_token_logits(screens(2)[:2])
    more = screens(2)[:2]
    more[1] = {**more[1], "content": [*more[1]["content"], {"type": "text", "text": "and this?"}]}
    with chat.backbone.measure() as work:
        logits = chat.next_token_logits(more)
    # the text with the tag, its canonical, and the generation prompt
    assert work.forwards == 3
    assert relative(logits, plain_logits(chat.backbone, more)) <= CLOSE


def test_every_prompt_token_is_counted_once():
    chat = session(seeing(), FULL, mode="repair")
    for messages in (screens(3), policies.keep_last_images(2)(screens(4), 0), screens(1)):
        report = chat.send(messages, **GREEDY).report
        total = report.kept + report.turned + report.patched + report.prefilled
        assert total == chat.prompt_ids.shape[0] and min(report.prefilled, report.left) >= 0


def test_the_answer_is_the_models_own_and_joins_the_history():
    backbone = speaking("headers")
    chat = session(backbone)
    turn = chat.send(TALK[0]["content"], **GREEDY)
    ids = backbone.processor.apply_chat_template(
        TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        whole = backbone.model.generate(**ids, **GREEDY)[0, ids["input_ids"].shape[1] :]
    assert turn.text == backbone.processor.decode(whole, skip_special_tokens=True)
    assert chat.messages == [TALK[0], {"role": "assistant", "content": turn.text}]


def test_an_edit_policy_shapes_the_prompt_and_not_the_history():
    chat = session(seeing(), edit_policy=policies.keep_last_images(1))
    chat.send(screens(3), **GREEDY)
    opening = chat.backbone.processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert int((chat.prompt_ids == opening).sum()) == 1
    assert len(chat.messages) == len(screens(3)) + 1


def test_logits_are_asked_behind_the_history_as_it_is():
    chat = session(seeing())
    chat.send(screens(1), **GREEDY)
    before = chat.messages
    assert relative(chat.next_token_logits(), plain_logits(chat.backbone, before)) <= CLOSE
    assert chat.messages == before


def test_another_system_prompt_is_another_window():
    chat = session(seeing())
    chat.next_token_logits(screens(1))
    first = chat.window
    messages = [{"role": "system", "content": "Be brief."}, *screens(1)[1:]]
    assert apart(chat, messages) <= CLOSE
    assert chat.window is not first


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


def test_a_turn_tells_the_time_to_its_first_token():
    chat, calls = session(speaking("headers")), []

    def note(input_ids, scores):
        calls.append(len(calls))
        return scores

    report = chat.send(TALK[:1], logits_processor=[note], **GREEDY).report
    assert report.first_token > 0 and report.seconds > 0 and len(calls) == 3
    assert chat.edit([]).first_token is None
    plain = session(speaking("headers"), max_tokens=400, uncached=True).send(LONG_TALK, **GREEDY).report
    assert plain.uncached and plain.first_token > 0


def test_a_backbone_without_a_processor_is_refused():
    with pytest.raises(ProcessorRequired, match="chat template"):
        ChatSession(tiny.backbone("qwen2_5_vl"), ChunkStore.open("memory://"), policy=EXACT)


def test_a_mode_there_is_not_is_refused():
    with pytest.raises(ValueError, match="mode 'erase'"):
        session(seeing(), mode="erase")


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


EDITS = {
    "slide": lambda window: window.slide(),
    "evict": lambda window: window.evict(1),
    "reorder": lambda window: window.reorder([*range(1, len(window)), 0]),
    "replace": lambda window: window.replace(0, "another text"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_a_caller_does_in_a_sessions_window_is_the_callers_alone(edit):
    chat = session(seeing())
    chat.send(screens(2), **GREEDY)
    held = chat.window.slots
    EDITS[edit](chat.window)
    assert [s.chunk_id for s in chat.window.slots] == [s.chunk_id for s in held]
    history = chat.messages
    assert (
        relative(
            chat.next_token_logits("and now?"),
            plain_logits(chat.backbone, [*history, {"role": "user", "content": "and now?"}]),
        )
        <= CLOSE
    )
    assert relative(chat.fork().next_token_logits(), plain_logits(chat.backbone, history)) <= CLOSE


def test_a_history_that_its_sender_or_reader_changes_in_place_stays_the_sessions():
    chat = session(seeing())
    sent = screens(2)
    chat.send(sent, **GREEDY)
    kept = [dict(m) for m in screens(2)]
    sent[1]["content"].append({"type": "text", "text": "never said"})
    read = chat.messages
    read[1]["content"].clear()
    ids = chat.prompt_ids.clone()
    chat.prompt_ids.fill_(0)
    assert [m["content"] for m in chat.messages[1:2]] == [m["content"] for m in kept[1:2]]
    assert torch.equal(chat.prompt_ids, ids)
    assert apart(chat, chat.messages) <= CLOSE


def test_a_template_that_drops_strings_is_given_our_own_texts_as_parts():
    """SmolVLM's way; what a client writes stays as it is, and a string is refused by name."""
    template = BEGIN + "{% else %}" + ITEMS + END
    backbone = HfEngine(processors.matching_model(), processors.picture_processor(template))
    chat, pool = session(backbone), SessionPool(backbone, ChunkStore.open("memory://"), policy=EXACT)
    for one in (chat, pool):
        turn = one.send("what is it?", max_new_tokens=2)
        history = one.history(turn.turn_id) if one is pool else one.messages
        assert [m["content"][0]["text"] for m in history] == ["what is it?", turn.text]
        with pytest.raises(ModalityNotSupported, match="does not show a text that is a string"):
            one.send([{"role": "user", "content": "what is it?"}], max_new_tokens=2)
    assert (
        apart(chat, [*chat.messages, {"role": "user", "content": [{"type": "text", "text": "so?"}]}]) <= CLOSE
    )

"""Directives edit a session's history and the window behind it, or are refused and change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.edits import Directive
from kamera.errors import InvalidDirective
from kamera.sessions.modes import worth_to_others
from tests.content.templates import AGENT, LONG_TALK, TOOLS, picture, screens
from tests.engines.compare import relative
from tests.sessions.rig import FULL, plain_logits, seeing, session, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def _shown(messages, backbone=None, **options):
    chat = session(backbone or seeing(), **options)
    chat.next_token_logits(messages)
    chat.send(messages, **GREEDY)
    return chat


def _agrees(chat) -> None:
    wanted = plain_logits(chat.backbone, chat.messages, chat.manner.tools)
    assert relative(chat.next_token_logits(chat.messages), wanted) <= 1e-4


def _media(chat) -> list[int]:
    return [i for i, s in enumerate(chat.render().segments) if s.media is not None]


def test_messages_leave_and_the_next_answer_never_saw_them():
    chat = _shown(screens(3))
    before = chat.messages
    report = chat.edit([Directive(1, 3, unit="messages", mode="forget")])
    assert chat.messages == [before[0], *before[3:]] and report.left > 20 and report.vision_encodes == 0
    _agrees(chat)


def test_a_text_stands_in_a_messages_place():
    chat = _shown(LONG_TALK, speaking("headers"))
    chat.edit([Directive(1, 4, "cut", unit="messages", mode="forget")])
    assert [m["content"] for m in chat.messages[:3]] == [
        LONG_TALK[0]["content"],
        "cut",
        LONG_TALK[4]["content"],
    ]
    _agrees(chat)


def test_a_picture_is_a_segment_and_leaves_by_its_index():
    chat = _shown(screens(3))
    chat.edit([Directive(_media(chat)[1], _media(chat)[1] + 1, "[omitted]", unit="segments", mode="forget")])
    assert chat.messages[3]["content"] == [
        {"type": "text", "text": "step 1"},
        {"type": "text", "text": "[omitted]"},
    ]
    _agrees(chat)


def test_tokens_inside_of_a_text_leave_it():
    chat = _shown(LONG_TALK, speaking("headers"))
    rendered, wanted = chat.render(), chat.render().ids.tolist()
    inside = [s for s in rendered.segments if s.messages == (3, 4)]
    start, stop = inside[1].start + 4, inside[2].start + 9
    chat.edit([Directive(start, stop, "NOTE", mode="forget")])
    wanted[start:stop] = chat.backbone.processor("NOTE", add_special_tokens=False)["input_ids"]
    assert chat.render().ids.tolist() == wanted and "NOTE" in chat.messages[3]["content"]
    _agrees(chat)


def test_a_word_that_stands_there_often_changes_in_its_place():
    chat = _shown([{"role": "user", "content": "ho ho ho ho"}], speaking("headers"))
    body = chat.render().tags[0][1]
    chat.edit([Directive(body + 6, body + 8, "ha", mode="forget")])
    assert chat.messages[0]["content"] == "ho ho ha ho"


def test_equal_captions_of_one_message_are_told_apart():
    frames = [{"type": "image", "image": picture(i)} for i in range(3)]
    content = [item for frame in frames for item in (frame, {"type": "text", "text": "frame\n"})]
    chat = _shown([{"role": "user", "content": content}])
    second = _media(chat)[1]
    chat.edit([Directive(second, second + 2, "[gone]", unit="segments", mode="forget")])
    texts = [item.get("text") for item in chat.messages[0]["content"]]
    assert texts == [None, "frame\n", "[gone]", "", None, "frame\n"]
    _agrees(chat)


def test_a_span_may_reach_over_several_texts_of_a_message():
    content = [{"type": "text", "text": t} for t in ("one two ", "three ", "four five")]
    chat = _shown([{"role": "user", "content": [*content, {"type": "image", "image": picture(1)}]}])
    tokenizer, ids = chat.backbone.processor.tokenizer, chat.render().ids.tolist()
    words, first = tokenizer("one two three four")["input_ids"], len(tokenizer("one ")["input_ids"])
    at = next(i for i in range(len(ids)) if ids[i : i + len(words)] == words)
    chat.edit([Directive(at + first, at + len(words), "X", mode="forget")])
    assert [item.get("text") for item in chat.messages[0]["content"]] == ["one X", "", " five", None]
    _agrees(chat)


def test_several_directives_count_in_one_prompt():
    chat = _shown(screens(4))
    first, last = _media(chat)[0], _media(chat)[3]
    chat.edit(
        [
            Directive(first, first + 1, unit="segments", mode="forget"),
            Directive(3, 4, "gone", unit="messages"),
            Directive(last, last + 1, "[b]", unit="segments"),
        ]
    )
    contents = [m["content"] for m in chat.messages]
    assert contents[1] == [{"type": "text", "text": "step 0"}] and contents[3] == "gone"
    assert contents[7][1] == {"type": "text", "text": "[b]"}
    _agrees(chat)


def test_the_strictest_mode_holds_for_all():
    chat = _shown(screens(3), policy=FULL, mode="amortize")
    chat.edit([Directive(1, 2, unit="messages", mode="amortize")])
    assert worth_to_others(chat.window) == "survivor"
    chat = _shown(screens(3), policy=FULL, mode="amortize")
    both = [
        Directive(1, 2, unit="messages", mode="amortize"),
        Directive(4, 5, unit="messages", mode="forget"),
    ]
    chat.edit(both)
    assert worth_to_others(chat.window) == "exact"


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_chained_edits_equal_one(mode):
    one = _shown(screens(4), policy=FULL, mode=mode)
    chained = _shown(screens(4), policy=FULL, mode=mode)
    for chat in (one, chained):
        chat.next_token_logits()  # the answer, too, is in the window before any edit
    one.edit([Directive(1, 3, unit="messages", mode=mode), Directive(5, 6, unit="messages", mode=mode)])
    for start, end in ((5, 6), (2, 3), (1, 2)):
        chained.edit([Directive(start, end, unit="messages", mode=mode)])
    assert one.messages == chained.messages and worth_to_others(one.window) == worth_to_others(chained.window)
    assert relative(chained.next_token_logits(), one.next_token_logits()) <= 1e-5
    for mine, theirs in zip(chained.window.slots, one.window.slots, strict=True):
        assert (mine.chunk_id, mine.guarantee) == (theirs.chunk_id, theirs.guarantee)


@pytest.mark.parametrize(
    ("directives", "says"),
    [
        ([Directive(1, 2, [5, 6], unit="messages")], "give text"),
        ([Directive(1, 1, "hi", unit="messages")], "needs a role"),
        ([Directive(0, 7, unit="messages")], "leave no message"),
        ([Directive(2, 3, unit="messages")], "renders messages 2:4 in one piece"),
        ([Directive(0, 2, unit="messages"), Directive(1, 2, unit="messages")], "overlap"),
    ],
)
def test_what_no_change_of_messages_does_is_refused(directives, says):
    chat = _shown(AGENT, speaking("thinking"), tools=TOOLS)
    before, ids, slots = chat.messages, chat.prompt_ids, chat.window.slots
    with pytest.raises(InvalidDirective, match=says):
        chat.edit(directives)
    assert chat.messages == before and torch.equal(chat.prompt_ids, ids) and chat.window.slots == slots


def test_a_span_the_template_would_write_otherwise_is_refused():
    chat = _shown(LONG_TALK, speaking("headers"))
    body = chat.render().tags[0][1]
    # spaces in the place of the text's first letter: the template trims them away
    ids = chat.backbone.processor("  ", add_special_tokens=False)["input_ids"]
    with pytest.raises(InvalidDirective, match="no change of the messages"):
        chat.edit([Directive(body, body + 1, ids)])


@settings(max_examples=10)
@given(st.data())
def test_any_directives_are_carried_out_or_refused_by_name(data):
    chat = _shown(screens(2))
    before, size = chat.messages, chat.render().stable
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, min(size, start + 60)))
    new = data.draw(st.sampled_from([None, "x", "two words"]))
    snap = data.draw(st.sampled_from(["refuse", "widen"]))
    wanted = chat.render().ids.tolist()[:size]
    try:
        chat.edit([Directive(start, stop, new, mode="forget")], snap=snap)
    except InvalidDirective:
        assert chat.messages == before
        return
    if snap == "refuse":
        wanted[start:stop] = [] if new is None else chat.backbone.processor.tokenizer(new)["input_ids"]
        after = chat.render()
        assert after.ids.tolist()[: after.stable] == wanted
    _agrees(chat)

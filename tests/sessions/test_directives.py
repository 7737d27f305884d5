"""Directives edit a session's history and the window behind it, or are refused and change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ReusePolicy
from kamera.edits import Directive
from kamera.errors import EditPolicyFailed, InvalidDirective
from kamera.sessions.layout import worth_to_others
from tests.content.templates import AGENT, TOOLS, screens
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


def test_messages_leave_and_the_next_answer_never_saw_them():
    chat = _shown(screens(3))
    before = chat.messages
    report = chat.edit([Directive(1, 3, unit="messages", mode="forget")])
    assert chat.messages == [before[0], *before[3:]] and report.left > 20 and report.vision_encodes == 0
    _agrees(chat)


@pytest.mark.few(1)
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


class DropsOld:
    """A policy that takes all but the last exchanges out, by directives of one mode."""

    def __init__(self, mode: str, unit: str = "messages") -> None:
        self.mode, self.unit = mode, unit

    def transform(self, messages, turn):
        gone = max(0, len(messages) - 4)
        return [Directive(1, 1 + gone, mode=self.mode, unit=self.unit)] if gone else None


@pytest.mark.parametrize(("mode", "guarantee"), [("forget", "exact"), ("amortize", "survivor")])
def test_a_policy_may_be_an_object_whose_directives_edit_each_in_its_mode(mode, guarantee):
    chat = session(seeing(), ReusePolicy(minimum="survivor"), edit_policy=DropsOld(mode), anticipates=False)
    history = screens(2)
    for _ in range(3):
        turn = chat.send(history, **GREEDY)
        history = [*chat.messages, {"role": "user", "content": "and what now?"}]
    whole = chat.messages
    shown = [whole[0], *whole[-4:-1]]  # what the last turn was asked
    assert chat.prompt_ids.tolist() == chat._conversations.render(shown).ids.tolist()
    assert len(whole) == len(history) - 1 and turn.report.guarantee == guarantee
    if mode == "forget":
        logits = plain_logits(chat.backbone, [whole[0], *history[-3:]])
        assert relative(chat.next_token_logits(history), logits) <= 1e-4


def test_a_departure_by_directives_is_prepared_and_costs_its_new_tokens():
    chat = session(seeing(), edit_policy=DropsOld("forget"))
    history = screens(2)
    for _ in range(3):
        turn = chat.send(history, **GREEDY)
        chat.flush()
        history = [*chat.messages, {"role": "user", "content": "and what now?"}]
    assert turn.report.anticipated and turn.report.prefilled < turn.usage.prompt_tokens / 2


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        (DropsOld("forget", "tokens"), InvalidDirective, "cut a picture or a template tag"),
        (lambda messages, turn: [Directive(0, 1, verb="share")], EditPolicyFailed, "the verb share"),
        (lambda messages, turn: [Directive(0, 1), messages[0]], EditPolicyFailed, "a message is a dict"),
        (lambda messages, turn: [], EditPolicyFailed, "None stands for no change"),
        (lambda messages, turn: 7, EditPolicyFailed, "returned int"),
    ],
)
def test_what_a_policy_may_not_return_is_refused_and_nothing_changes(policy, error, says):
    chat = session(seeing(), edit_policy=policy)
    with pytest.raises(error, match=says):
        chat.send(screens(2), **GREEDY)
    assert chat.messages == [] and chat.window is None

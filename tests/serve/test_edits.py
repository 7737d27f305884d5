"""Clients that edit their histories in ten ways: plain transformers' answers, at a prefix cache's price."""

from __future__ import annotations

import pytest

from benchmarks.price.counting import named, shared, watching
from benchmarks.serve.edits import AGAIN, KINDS, UNDO, talk
from kamera.content import own_messages
from tests.content.templates import picture, screens
from tests.engines.compare import relative
from tests.serve.rig import backbone, frames
from tests.sessions.rig import plain_logits, seeing, session


@pytest.mark.parametrize("seed", [0, 1], ids=["with an id", "without"])
def test_every_kind_of_edit_is_answered_as_by_plain_transformers_and_is_never_dearer(seed):
    rows = [*talk(backbone(), frames(), seed)]
    assert {row["edit"] for row in rows} == {*KINDS, UNDO, AGAIN, "none"}
    assert [row["edit"] for row in rows if row["answers that differ"]] == []
    assert [row for row in rows if row["first, tokens"] > row["prefix cache"]] == []
    assert sum(row["first, tokens"] for row in rows) < 0.8 * sum(row["prompts"] for row in rows)


@pytest.mark.parametrize("moves", [False, True], ids=["another picture", "one from further behind"])
def test_a_picture_takes_over_the_words_in_front_of_the_one_before_it_where_positions_have_axes(moves):
    chat, messages = session(seeing(), anticipates=False), screens(3)
    chat.next_token_logits(messages)
    (text, _), (_, later) = messages[1]["content"], messages[5]["content"]
    other = [text, later if moves else {"type": "image", "image": picture(9)}]
    edited = [messages[0], {"role": "user", "content": other}, *messages[2:4], *messages[6:]]
    placeholder = chat.backbone.model.config.image_token_id
    was, now = (named(chat._conversations.render(own_messages(m)), placeholder) for m in (messages, edited))
    with watching(chat.backbone) as ran:
        logits = chat.next_token_logits(edited)
    assert now[shared(was, now)] != placeholder and sum(ran.spans) <= len(now) - shared(was, now)
    assert relative(logits, plain_logits(chat.backbone, edited)) <= 1e-4

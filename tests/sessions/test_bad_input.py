"""Bad input: a named error or an uncached answer that says so, and never a changed session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kamera.errors import (
    ModalityNotSupported,
    UnreadableMedia,
)
from tests.content.templates import AGENT, TALK, TOOLS, screens
from tests.engines.compare import relative
from tests.sessions.rig import plain_logits, seeing, session, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def _shot(source) -> dict:
    return {"role": "user", "content": [{"type": "image", "image": source}]}


@contextmanager
def unchanged(chat) -> Iterator[None]:
    """What is asked within leaves history, prompt and window as they are."""
    before, ids, slots = chat.messages, chat.prompt_ids, chat.window.slots
    yield
    assert chat.messages == before and torch.equal(chat.prompt_ids, ids) and chat.window.slots == slots


@pytest.fixture(scope="module")
def shown():
    chat = session(seeing(), uncached=True)
    chat.send(screens(1), **GREEDY)
    return chat


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (_shot("/no/such.png"), UnreadableMedia, "no image at"),
        (_shot(b"abc"), UnreadableMedia, "3 bytes cannot be read"),
        (_shot("https://example.com/a.png"), UnreadableMedia, "fetches nothing"),
        (_shot("data:image/png;base64,AAAA"), UnreadableMedia, "cannot be read"),
        ({"role": "user", "content": [{"type": "audio"}]}, ModalityNotSupported, "is audio"),
        ({"role": "user", "content": 7}, ModalityNotSupported, "template refuses"),
        ({"content": "x"}, ValueError, "message 0 has the role None"),
        (["x"], ValueError, "message 0 is 'x'"),
        ([TALK[0], {"role": "", "content": "x"}], ValueError, "message 1 has the role ''"),
        ([], ValueError, "no messages"),
    ],
)
def test_what_is_no_message_or_picture_is_named(shown, wrong, error, says):
    with unchanged(shown), pytest.raises(error, match=says):
        shown.send(wrong, **GREEDY)  # also where the plain model may answer: it could not either


@pytest.mark.parametrize(
    "messages",
    [
        [*AGENT[:2], AGENT[5]],  # a call without its result
        [AGENT[0], *AGENT[2:4], AGENT[5]],  # results without their call
        [*AGENT[:2], {**AGENT[2], "tool_call_id": "9"}],  # a result of a call there was not
        [AGENT[0], {"role": "stranger", "content": "who?"}],
    ],
)
def test_what_the_template_renders_answers_as_uncached(messages):
    chat = session(speaking("thinking"), tools=TOOLS)
    chat.send(AGENT[:4], **GREEDY)
    assert relative(chat.next_token_logits(messages), plain_logits(chat.backbone, messages, TOOLS)) <= 1e-4

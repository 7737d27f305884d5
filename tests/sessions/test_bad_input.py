"""Bad input: a named error or an uncached answer that says so, and never a changed session."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kamera import ChatSession, ChunkStore, SessionPool
from kamera.edits import Directive
from kamera.errors import (
    EditPolicyFailed,
    InvalidDirective,
    ModalityNotSupported,
    UnreadableMedia,
    WindowFull,
)
from tests.content.templates import AGENT, LONG_TALK, TALK, TOOLS, picture, screens
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


@pytest.mark.parametrize("name", ["tools", "mode", "policy", "edit_policy", "reuse", "uncached", "engine"])
def test_an_option_of_the_constructor_is_named_as_that(name):
    with pytest.raises(ValueError, match=rf"give it to ChatSession\({name}=…\)"):
        session(speaking("headers")).send("hi", **{name: []}, **GREEDY)
    pool = SessionPool(speaking("headers"), ChunkStore.open("memory://"))
    if name != "tools":  # of a request there
        with pytest.raises(ValueError, match=rf"give it to SessionPool\({name}=…\)"):
            pool.send("hi", **{name: []}, **GREEDY)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda b, s: ChatSession("testbed", s), "'testbed' is no Backbone"),
        (lambda b, s: ChatSession(b, "memory://"), "'memory://' is no ChunkStore"),
        (lambda b, s: SessionPool(b, "memory://"), "'memory://' is no ChunkStore"),
        (lambda b, s: ChatSession.load("x", b, None), "None is no ChunkStore"),
        (lambda b, s: ChatSession(b, s, max_tokens="many"), "max_tokens='many'"),
        (lambda b, s: ChatSession(b, s, tools=TOOLS[0]), "give a list of schemas or functions"),
        (lambda b, s: ChatSession(b, s, edit_policy="last"), "edit_policy 'last' is none"),
    ],
)
def test_what_no_session_can_be_made_of_is_refused_before_it_is_used(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong(speaking("headers"), ChunkStore.open("memory://"))


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
        ({"role": "user", "content": [{"type": "audio"}]}, ModalityNotSupported, "none of text, image"),
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


def test_pictures_in_openais_form_are_pictures(tmp_path):
    data = io.BytesIO()
    picture(3).save(data, "PNG")
    (tmp_path / "a.png").write_bytes(data.getvalue())
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    chat = session(seeing())
    wanted = chat.next_token_logits([_shot(picture(3))])
    for source in (url, Path(tmp_path / "a.png").as_uri()):
        item = {"type": "image_url", "image_url": {"url": source, "detail": "high"}}
        found = session(seeing()).next_token_logits([{"role": "user", "content": [item]}])
        assert torch.equal(found, wanted)


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


def test_a_history_longer_than_the_model_is_refused_or_uncached():
    backbone = speaking("headers")
    limit = backbone.limits.trained
    long = [{"role": "user", "content": "word " * (limit // 5 + 1)}]
    chat = session(backbone)
    chat.send(TALK[:1], **GREEDY)
    with unchanged(chat), pytest.raises(WindowFull, match=f"positions, this model {limit}"):
        chat.send(long, **GREEDY)
    other = session(backbone, uncached=True)
    turn = other.send(long, **GREEDY)
    assert turn.report.uncached.startswith("WindowFull") and len(other.prompt_ids) > limit
    short = [{"role": "user", "content": "word " * (limit // 5 - 40)}]
    assert session(backbone).send(short, **GREEDY).report.uncached is None


def test_a_policy_that_fails_later_leaves_the_session_as_it_was():
    def tires(messages, turn):
        return messages if turn < 1 else None

    chat = session(speaking("headers"), edit_policy=tires)
    chat.send(TALK[:1], **GREEDY)
    with unchanged(chat), pytest.raises(EditPolicyFailed, match="tires returned NoneType"):
        chat.send("more", **GREEDY)


def test_tokens_that_do_not_tokenise_again_are_refused():
    chat = session(speaking("headers"))
    chat.send(LONG_TALK, **GREEDY)
    tokenizer, rendered = chat.backbone.processor, chat.render()
    i, n = (tokenizer.convert_tokens_to_ids(letter) for letter in "in")
    assert tokenizer("in", add_special_tokens=False)["input_ids"] not in ([i, n], [n, i])
    body = rendered.tags[0][1]
    before = chat.messages
    with pytest.raises(InvalidDirective, match="no change of the messages"):
        chat.edit([Directive(body + 4, body + 5, [i, n])])
    assert chat.messages == before


@pytest.mark.parametrize("style", ["headers", "thinking"])
def test_a_clock_in_the_system_prompt_is_an_edit_like_any_other(style):
    chat = session(speaking(style))
    for minute in range(3):
        clock = {"role": "system", "content": f"You mend code. It is 10:{minute:02d}."}
        history = [clock, *LONG_TALK[: 2 * minute + 1]]
        assert relative(chat.next_token_logits(history), plain_logits(chat.backbone, history)) <= 1e-4


def test_a_clock_in_the_system_prompt_costs_no_encode():
    chat = session(seeing())
    chat.send(screens(2), **GREEDY)
    later = [{"role": "system", "content": "It is 10:01."}, *screens(2)[1:]]
    assert chat.send(later, **GREEDY).report.vision_encodes == 0
    assert relative(chat.next_token_logits(later), plain_logits(chat.backbone, later)) <= 1e-4

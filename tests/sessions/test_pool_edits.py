"""Edits and scratch of pooled sessions by their ids; what clients do to their own past."""

from __future__ import annotations

import io
import logging
import threading

import pytest
from PIL import Image

from kamera import ChunkStore
from kamera.edits import Directive
from kamera.errors import SessionConflict, UnknownSession
from kamera.sessions import SessionPool, Stream
from tests.content.templates import picture, screens
from tests.sessions.rig import EXACT, seeing, session, speaking

GREEDY = {"max_new_tokens": 3, "do_sample": False}


def pool(model=None, **options) -> SessionPool:
    return SessionPool(model or speaking("headers"), ChunkStore.open("memory://"), policy=EXACT, **options)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


BEGUN = [user("a"), {"role": "assistant", "content": "b"}, user("c")]


@pytest.mark.parametrize("saved", [False, True])
def test_an_edit_by_session_id_is_the_sessions_own(tmp_path, saved):
    options = {"save": tmp_path} if saved else {}
    of, alone = pool(**options), session(speaking("headers"))
    name = of.send(BEGUN, **GREEDY).session_id
    alone.send(BEGUN, **GREEDY)
    if saved:  # another process goes on with it
        of.flush()
        of = pool(**options)
    assert of.edit(name, [Directive(0, 2, unit="messages")]).left > 0
    alone.edit([Directive(0, 2, unit="messages")])
    assert of.send("d", name, **GREEDY).text == alone.send("d", **GREEDY).text
    assert [m["content"] for m in of.session(name).messages] == [m["content"] for m in alone.messages]
    assert of.session(name).messages[0]["content"] == "c"
    with pytest.raises(UnknownSession):
        of.edit("none", [])


def test_scratch_by_session_id():
    of = pool(seeing())
    name = of.send(screens(2), **GREEDY).session_id
    before = of.session(name).messages
    scratch = [user("think of the second")]
    turn = of.send("what next?", name, scratch=scratch, **GREEDY)
    alone = session(seeing())
    alone.send(screens(2), **GREEDY)
    assert turn.text == alone.send("what next?", scratch=scratch, **GREEDY).text
    assert len(of.session(name).messages) == len(before) + 2  # without the scratch


def test_a_session_that_answers_is_not_edited():
    of, begun, go = pool(), threading.Event(), threading.Event()

    class Slow(Stream):
        def tell(self, text: str) -> None:
            begun.set()
            go.wait(20)

    name = of.send([user("a")], **GREEDY).session_id
    answering = threading.Thread(target=lambda: of.send("b", name, stream=Slow(), **GREEDY))
    answering.start()
    begun.wait(20)
    with pytest.raises(SessionConflict, match="after that"):
        of.edit(name, [Directive(0, 1, unit="messages")])
    go.set()
    answering.join()
    of.edit(name, [Directive(0, 2, unit="messages")])
    assert of.session(name).messages[0]["content"] == "b"


def test_a_wall_clock_in_the_system_prompt_is_named_once(caplog):
    of = pool()
    with caplog.at_level(logging.WARNING, logger="kamera"):
        for minute in range(6):
            system = {"role": "system", "content": f"You help. It is 12:{minute:02d}."}
            of.send([system, user("hello")], **GREEDY)
        of.send([{"role": "system", "content": "You help 2 people."}, user("hello")], **GREEDY)
    told = [r.message for r in caplog.records if "system prompt" in r.message]
    assert len(told) == 1 and "It is 12:02" in told[0] and "last message" in told[0]


def encoded(image: Image.Image, kind: str, **options) -> Image.Image:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return Image.open(held)


def test_pictures_encoded_again_without_loss_are_the_same_and_with_loss_others():
    of = pool(seeing())

    def shot(image: Image.Image) -> dict:
        return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}

    first = of.send([shot(picture(1))], **GREEDY)
    history = [{"role": "assistant", "content": first.text}, user("and?")]
    for kind, options in (("PNG", {"compress_level": 9}), ("WEBP", {"lossless": True, "exact": True})):
        again = of.send([shot(encoded(picture(1), kind, **options)), *history], **GREEDY)
        assert again.report.vision_encodes == 0 and again.report.kept > 8
    assert of.send([shot(encoded(picture(1), "JPEG")), *history], **GREEDY).report.vision_encodes == 1


def test_a_shorter_history_is_a_retry_and_a_long_one_is_one_session():
    of, history = pool(), [user("begin")]
    for number in range(60):
        turn = of.send(history, max_new_tokens=1, do_sample=False)
        assert turn.report.prefilled <= 40
        history += [{"role": "assistant", "content": turn.text}, user(f"go on {number}")]
    assert len(of) == 1
    retry = history[:41]
    alone = session(speaking("headers")).send(retry, **GREEDY)
    assert of.send(retry, **GREEDY).text == alone.text and len(of) == 1

"""A session owns the pictures and clips that it ran, whatever becomes of the caller's objects and files."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from kamera import ChatSession, ChunkStore, SessionPool
from kamera.content import load_image
from kamera.edits import Directive
from kamera.errors import UnreadableMedia
from tests.content.templates import picture
from tests.sessions.rig import EXACT, plain_logits, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}
A, B = picture(1), picture(2)


def png(image: Image.Image) -> bytes:
    into = io.BytesIO()
    image.save(into, "PNG")
    return into.getvalue()


def saved(folder: Path) -> Path:
    A.save(folder / "shot.png")
    return folder / "shot.png"


def overwrite(path: Path) -> None:
    B.save(path)


def draw_over(image: Image.Image) -> None:
    ImageDraw.Draw(image).rectangle((0, 0, *image.size), fill=(0, 0, 0))


def mapped(folder: Path) -> mmap.mmap:
    data = mmap.mmap(-1, 1 << 14)
    data[: len(png(A))] = png(A)
    return data


Make, Harm = Callable[[Path], Any], Callable[[Any], Any]

WAYS: dict[str, tuple[Make, Harm]] = {
    "an array is written to": (lambda _: np.array(A), lambda x: np.copyto(x, np.array(B))),
    "a view's base is written to": (lambda _: np.array(A)[:], lambda x: x.base.fill(0)),
    "a tensor is written to": (lambda _: torch.tensor(np.array(A)), lambda x: x.zero_()),
    "a tensor, channels first": (lambda _: torch.tensor(np.array(A)).permute(2, 0, 1), lambda x: x.zero_()),
    "a picture is pasted over": (lambda _: A.copy(), lambda x: x.paste(B)),
    "a picture is drawn on": (lambda _: A.copy(), draw_over),
    "a picture is closed": (lambda d: Image.open(saved(d)), lambda x: x.close()),
    "a lazy picture's file goes": (lambda d: Image.open(saved(d)), lambda x: os.remove(x.filename)),
    "a file is overwritten": (saved, overwrite),
    "a file is deleted": (saved, os.remove),
    "a file's name is deleted": (lambda d: str(saved(d)), os.remove),
    "a url's file is deleted": (lambda d: saved(d).as_uri(), lambda x: os.remove(x[len("file://") :])),
    "an open file is closed": (lambda d: saved(d).open("rb"), lambda x: x.close()),
    "a stream is closed": (lambda _: io.BytesIO(png(A)), lambda x: x.close()),
    "a stream is truncated": (lambda _: io.BytesIO(png(A)), lambda x: x.truncate(3)),
    "a bytearray is written to": (lambda _: bytearray(png(A)), lambda x: x.__setitem__(slice(None), png(B))),
    "a memoryview's base is written to": (
        lambda _: memoryview(bytearray(png(A))),
        lambda x: x.__setitem__(slice(40, 80), bytes(40)),
    ),
    "a map of memory is written to": (mapped, lambda x: x.__setitem__(slice(40, 80), bytes(40))),
    "bytes stay": (lambda _: png(A), lambda x: None),
}


def form(key: str, source: Any) -> dict[str, Any]:
    if key == "image_url":
        return {"type": "image_url", "image_url": {"url": source}}
    return {"type": "image", key: source}


def user(*items: Any) -> dict[str, Any]:
    parts = [i if isinstance(i, dict) else {"type": "text", "text": i} for i in items]
    return {"role": "user", "content": parts}


def run(source: Any, harm: Harm, key: str = "image", append: bool = False) -> ChatSession:
    """A turn with a picture, its harm, and one more turn."""
    chat, message = session(seeing()), user(form(key, source), "what?")
    chat.send([message], **GREEDY)
    harm(source)
    chat.send(user(form("image", B), "and?"), **GREEDY)
    return chat


@pytest.fixture(scope="module")
def wanted() -> ChatSession:
    return run(png(A), lambda x: None)


@pytest.mark.parametrize("way", WAYS)
def test_harm_to_the_callers_object_changes_nothing(way, wanted, tmp_path):
    make, harm = WAYS[way]
    chat = run(make(tmp_path), harm)
    ids = chat.render().segment_ids()
    assert ids == wanted.render().segment_ids()
    assert [s.chunk_id for s in chat.window] == [s.chunk_id for s in wanted.window]
    whole = [
        user(form("image", A), "what?"),
        chat.messages[1],
        user(form("image", B), "and?"),
        chat.messages[3],
    ]
    more = user("which was it?")
    want = plain_logits(seeing(), [*whole, more])
    forked = chat.fork()
    chat.save(tmp_path / "saved")
    loaded = ChatSession.load(tmp_path / "saved", seeing(), chat.store)
    for one in (chat, forked, loaded):
        assert one.render().segment_ids() == ids
        got = one.next_token_logits(more)
        assert float((got - want).norm() / want.norm()) < 1e-4
    (given,) = [i for i in chat.messages[0]["content"] if i["type"] == "image"]
    assert np.array_equal(np.asarray(load_image(given)), np.asarray(A))
    chat.edit([Directive(2, 4, unit="messages")])
    assert chat.render().segment_ids() == wanted.render().segment_ids()[: len(chat.render().segment_ids())]


def test_a_pool_owns_what_it_ran(tmp_path):
    pool = SessionPool(seeing(), ChunkStore.open("memory://"), policy=EXACT, save=tmp_path / "pool")
    path = saved(tmp_path)
    first = pool.send([user(form("image", path), "what?")], **GREEDY)
    os.remove(path)
    second = pool.send(user("and?"), first.session_id, **GREEDY)
    pool.flush()
    history = pool.history(second.turn_id)
    assert np.array_equal(np.asarray(load_image(history[0]["content"][0])), np.asarray(A))
    again = SessionPool(seeing(), ChunkStore.open("memory://"), policy=EXACT, save=tmp_path / "pool")
    whole = [user(form("image", A), "what?"), *history[1:]]
    assert (
        again.send(user("more"), first.session_id, **GREEDY).text
        == pool.send([*whole, user("more")], **GREEDY).text
    )


def test_media_that_cannot_be_read_leave_the_session_as_it_is(tmp_path, wanted):
    chat = run(png(A), lambda x: None)
    before = chat.render().segment_ids()
    os.mkfifo(tmp_path / "pipe.png")
    closed = io.BytesIO(png(A))
    closed.close()
    for source in (tmp_path / "no.png", tmp_path, tmp_path / "pipe.png", closed, b"", np.zeros(3), object()):
        with pytest.raises(UnreadableMedia):
            chat.send(user(form("image", source)), **GREEDY)
        assert chat.render().segment_ids() == before


# -- clips -----------------------------------------------------------------------------------------

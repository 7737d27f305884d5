"""A session owns the pictures and clips that it ran, whatever becomes of the caller's objects and files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kamera import ChatSession, ChunkStore, SessionPool
from kamera.content import load_image
from kamera.errors import UnreadableMedia
from tests.content.templates import picture
from tests.sessions.rig import EXACT, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}
A, B = picture(1), picture(2)


def png(image: Image.Image) -> bytes:
    into = io.BytesIO()
    image.save(into, "PNG")
    return into.getvalue()


def saved(folder: Path) -> Path:
    A.save(folder / "shot.png")
    return folder / "shot.png"


Make, Harm = Callable[[Path], Any], Callable[[Any], Any]


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

"""What a newcomer gives is taken for what it is, or refused by name: never for something else."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kamera import ChunkStore, KameraWindow
from kamera.errors import UnreadableMedia
from kamera.reuse import Reuser
from tests.content.templates import picture
from tests.sessions.rig import EXACT, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def window() -> KameraWindow:
    return KameraWindow(seeing(), ChunkStore.open("memory://"), policy=EXACT)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my shot.png"
    picture(3).save(path)
    return path


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


# -- strings that name a picture -------------------------------------------------------------------


def test_a_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for name in (str(tmp_path / "a.png"), tmp_path / "a.png"):
        with pytest.raises(UnreadableMedia, match=r"a\.png"):
            seeing().chunk(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/rgb.png", "no image at '/no/such/rgb.png'"),
        ("rgb.JPEG", "no image at 'rgb.JPEG'"),
        ("./my shots/rgb.webp", "no image at"),
        ("C:\\shots\\rgb.png", "no image at"),
        ("file:///no/such.png", "no image at '/no/such.png'"),
        ("file:///no/such", "no image at '/no/such'"),
        ("/no/such/clip.mp4", "no video at '/no/such/clip.mp4'"),
        ("https://example.com/a.png", "fetches nothing"),
        ("http://example.com/a?size=3", "fetches nothing"),
        ("s3://bucket/a.png", "fetches nothing"),
        ("data:image/png;base64,AAAA", "cannot be read"),
    ],
)
def test_a_string_that_looks_like_a_picture_is_never_text(name, says):
    held = window()
    for take in (held.append, lambda given: held.insert(0, given), held.search):
        with pytest.raises(UnreadableMedia, match=says.replace("\\", ".")) as caught:
            take(name)
        assert "\n" not in str(caught.value)
        # the way to have it as text all the same
        assert '{"type": "text"' in str(caught.value) or name.startswith("data:")
    assert held.slots == ()


# -- every form of a picture, wherever pictures are -----------------------------------------------

GRAY = np.asarray(picture(3).convert("L"))
ALPHA = np.asarray(picture(3).convert("RGBA"))

FORMS: dict[str, tuple[Any, Image.Image]] = {
    "bytes": (png(picture(3)), picture(3)),
    "bytearray": (bytearray(png(picture(3))), picture(3)),
    "memoryview": (memoryview(png(picture(3))), picture(3)),
    "BytesIO": (io.BytesIO(png(picture(3))), picture(3)),
    "gray": (GRAY, Image.fromarray(GRAY)),
    "gray, one channel": (GRAY[..., None], Image.fromarray(GRAY)),
    "RGBA": (ALPHA, Image.fromarray(ALPHA)),
    "RGB": (np.asarray(picture(3)), picture(3)),
    "data url": ("data:image/png;base64," + base64.b64encode(png(picture(3))).decode(), picture(3)),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("form", FORMS)
def test_a_window_takes_a_picture_in_every_form(form):
    given, same = FORMS[form]
    wanted = seeing().chunk(same).id
    assert seeing().chunk(given).id == wanted
    assert seeing().chunk({"type": "image", "image": given}).id == wanted
    assert seeing().chunk({"image": given}).id == wanted
    assert seeing().chunk([given, "what?"]).id == seeing().chunk([same, "what?"]).id
    assert seeing().chunk({"role": "user", "content": [{"type": "image", "image": given}]}).id == wanted
    held = window()
    assert held.append(given).slot.chunk_id == wanted
    held.evict(0)
    assert held.recall(like=given).slot.chunk_id == wanted
    assert held.search(given)[0].chunk_id == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_takes_a_picture_in_every_form(form, tmp_path):
    given, same = FORMS[form]
    chats = []
    for source in (same, given):
        shown = [{"role": "user", "content": [{"type": "image", "image": source}]}]
        chat = session(seeing(), reuse=True)
        chat.send(shown, **GREEDY)
        chat.send("and now?", **GREEDY)  # the same object is read once more
        chats.append(chat)
    one, other = (chat.render().segment_ids() for chat in chats)
    assert one == other
    chats[1].save(tmp_path / "saved")
    reuser = Reuser(seeing(), ChunkStore.open("memory://"), EXACT)
    messages = [{"role": "user", "content": [{"type": "image", "image": given}]}, *chats[1].messages[1:2]]
    plan = reuser.prepare([*messages, {"role": "user", "content": "what?"}])
    assert any(admission.reason for admission in plan.admissions)


# -- depth -----------------------------------------------------------------------------------------


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path

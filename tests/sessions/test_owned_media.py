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
from kamera.content import Clip, Medium, load_image, own_messages, shown_message
from kamera.content.video import load_clip
from kamera.edits import Directive
from kamera.errors import UnreadableMedia
from tests.content.templates import picture
from tests.content.test_chunks import write_video
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


@pytest.mark.parametrize("key", ["path", "url", "image_url"])
def test_an_item_keeps_its_form(key, wanted, tmp_path):
    chat = run(str(saved(tmp_path)), os.remove, key)
    assert chat.render().segment_ids() == wanted.render().segment_ids()
    item = chat.messages[0]["content"][0]
    assert item.keys() == form(key, None).keys()
    held = item[key]["url"] if key == "image_url" else item[key]
    assert np.array_equal(np.asarray(held), np.asarray(A))


def test_what_messages_give_back_is_the_clients(wanted, tmp_path):
    chat = run(A.copy(), lambda x: None)
    before = chat.render().segment_ids()
    chat.save(tmp_path / "saved")
    loaded = ChatSession.load(tmp_path / "saved", seeing(), chat.store)
    for history in (chat.messages, chat.history(chat.state.last), loaded.messages):
        history[0]["content"][0]["image"].paste(B)
        history[0]["content"].clear()
    assert loaded.render().segment_ids() == before
    assert chat.render().segment_ids() == before == wanted.render().segment_ids()
    chat.send([*chat.messages, user("more")], **GREEDY)  # and they can be sent again
    assert chat.render().segment_ids()[: len(before) - 1] == before[:-1]


def test_an_edit_policy_is_given_the_sessions_own(tmp_path):
    seen: list[Any] = []

    def policy(messages, turn):
        seen.extend(
            item["image"]
            for m in messages
            for item in m["content"]
            if isinstance(item, dict) and "image" in item
        )
        return messages

    chat, source = session(seeing(), edit_policy=policy), np.array(A)
    chat.send([user(form("image", source), "what?")], **GREEDY)
    source.fill(0)
    chat.send("and?", **GREEDY)
    assert all(isinstance(one, Medium) for one in seen)
    assert len({id(one) for one in seen}) == 1, "one copy, which is shared"
    assert np.array_equal(np.asarray(load_image(seen[0])), np.asarray(A))


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


def test_forks_share_one_copy_and_files_are_held_as_they_are(tmp_path):
    path, large = saved(tmp_path), np.zeros((512, 512, 3), np.uint8)
    chat = session(seeing())
    chat.send([user(form("image", path), form("image", large), "what?")], **GREEDY)
    chat.send("and?", **GREEDY)
    forked = chat.fork()
    held = [[i["image"] for i in one.state.messages[0]["content"][:2]] for one in (chat, forked)]
    assert all(a is b for a, b in zip(*held, strict=True))
    assert held[0][0].held == path.read_bytes()
    assert held[0][0].nbytes + held[0][1].nbytes == path.stat().st_size + 4 * 512 * 512


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

FRAMES = [picture(i) for i in range(4)]


def spoil(clip: Clip) -> None:
    for frame in clip.frames:
        frame.paste(B)


CLIPS: dict[str, tuple[Make, Harm]] = {
    "a file goes": (lambda d: write_video(d / "a.mp4"), os.remove),
    "a file is overwritten": (lambda d: write_video(d / "a.mp4"), lambda x: write_video(x, frames=3)),
    "a stream is closed": (
        lambda d: io.BytesIO(write_video(d / "a.mp4").read_bytes()),
        lambda x: x.close(),
    ),
    "a bytearray is cleared": (lambda d: bytearray(write_video(d / "a.mp4").read_bytes()), bytearray.clear),
    "a list of frames is emptied": (lambda _: [*FRAMES], list.clear),
    "frames are pasted over": (lambda _: [f.copy() for f in FRAMES], lambda x: [f.paste(B) for f in x]),
    "an array is written to": (lambda _: np.stack([np.array(f) for f in FRAMES]), lambda x: x.fill(0)),
    "a tensor is written to": (
        lambda _: torch.tensor(np.stack([np.array(f) for f in FRAMES])).permute(0, 3, 1, 2),
        lambda x: x.zero_(),
    ),
    "a clip's frames are pasted over": (
        lambda _: Clip(tuple(f.copy() for f in FRAMES), (0, 1, 2, 3), (0.0, 0.5, 1.0, 1.5), 2.0, 4),
        spoil,
    ),
    "frames' files go": (
        lambda d: [saved_as(d / f"{i}.png", f) for i, f in enumerate(FRAMES)],
        lambda x: [os.remove(f) for f in x],
    ),
}


def saved_as(path: Path, image: Image.Image) -> str:
    image.save(path)
    return str(path)


@pytest.mark.parametrize("way", CLIPS)
@pytest.mark.parametrize("options", [{}, {"max_frames": 2, "max_pixels": 28 * 28 * 4}])
def test_a_clip_is_owned_with_its_options(way, options, tmp_path):
    if way.startswith("a clip's"):
        options = {name: value for name, value in options.items() if name != "max_frames"}
    make, harm = CLIPS[way]
    source = make(tmp_path)
    item = {"type": "video", "video": source, **options}
    want = load_clip(item)
    pixels = want.array()
    (owned,) = own_messages([user(item, "what?")])
    harm(source)
    for given in (owned, *own_messages([owned]), shown_message(owned)):
        clip = load_clip({**given["content"][0]})
        assert np.array_equal(clip.array(), pixels)
        assert (clip.seconds, clip.fps, clip.total_frames) == (want.seconds, want.fps, want.total_frames)
    shown = shown_message(owned)["content"][0]["video"]
    if isinstance(shown, Clip):
        spoil(shown)
        assert np.array_equal(load_clip({**owned["content"][0]}).array(), pixels)

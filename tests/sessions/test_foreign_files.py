"""A saved session is all of one piece: a part of another, or another's place, is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kamera import ChunkStore
from kamera.errors import CorruptChunk, IncompatibleChunk
from kamera.sessions import ChatSession
from kamera.sessions.save import SESSION
from kamera.window import former_of
from tests.content.templates import screens
from tests.engines.compare import relative
from tests.sessions.rig import plain_logits, seeing
from tests.sessions.test_pool_saving import GREEDY, HELLO, opened


def _agrees(chat: ChatSession) -> None:
    assert relative(chat.next_token_logits(), plain_logits(chat.backbone, chat.messages)) <= 1e-4


@pytest.fixture
def two(tmp_path) -> Path:
    """Two saved sessions of one picture each, equally long."""
    pool = opened(tmp_path, seeing())
    pool.send(screens(1, 0), "a", **GREEDY)
    pool.send(screens(1, 1), "b", **GREEDY)
    pool.flush()
    assert [s.length for s in pool.session("a").window] == [s.length for s in pool.session("b").window]
    return tmp_path


def _folder(root: Path, name: str) -> Path:
    folders = [file.parent for file in root.glob("*/session.safetensors")]
    (found,) = [folder for folder in folders if SESSION.read(folder).document["id"] == name]
    return found


def test_the_window_of_another_session_is_prefilled_again(two):
    (theirs,) = _folder(two, "b").glob("window-*/window.safetensors")
    (mine,) = _folder(two, "a").glob("window-*/window.safetensors")
    shutil.copy(theirs, mine)
    with pytest.raises(CorruptChunk, match="another window"):
        ChatSession.load(_folder(two, "a"), seeing(), ChunkStore.open("memory://"))
    pool = opened(two, seeing())
    turn = pool.send("and now?", "a", **GREEDY)
    assert turn.report.kept <= former_of(pool.session("a").window).anchor.length
    _agrees(pool.session("a"))
    found = opened(two, seeing()).send(screens(1, 0), **GREEDY)
    assert found.text == opened(two / "none", seeing()).send(screens(1, 0), **GREEDY).text


def test_the_folder_of_another_tenant_is_refused(tmp_path):
    theirs = opened(tmp_path, tenant="ann")
    theirs.send(HELLO, "s", **GREEDY)
    theirs.flush()
    (folder,) = [f.parent for f in tmp_path.glob("*/session.safetensors")]
    mine = opened(tmp_path, tenant="ben")
    folder.rename(mine._saves._path("ben", "s"))
    with pytest.raises(IncompatibleChunk, match="tenant"):
        mine.send("more", "s", **GREEDY)
    assert mine.list_saved() == opened(tmp_path, tenant="ann").list_saved() == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Path]:
    """The directory of two saved sessions, and the document of the one named "bad"."""
    root = tmp_path_factory.mktemp("saved")
    pool = opened(root)
    for name in ("bad", "good"):
        pool.send([{"role": "user", "content": f"{name} it is"}], name, **GREEDY)
    pool.flush()
    return root, _folder(root, "bad") / "session.safetensors"

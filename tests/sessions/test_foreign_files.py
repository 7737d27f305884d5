"""A saved session is all of one piece: a part of another, or another's place, is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kamera import ChunkStore
from kamera.errors import CorruptChunk, ForeignObject, IncompatibleChunk, KameraError
from kamera.sessions import ChatSession
from kamera.sessions.document import SESSION, sign_document
from kamera.window import Saved, former_of
from tests.content.templates import TALK, screens
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, plain_logits, seeing, speaking
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


def test_a_session_of_a_sealed_store_is_served_under_its_secret_only(tmp_path):
    def store(secret: str | None) -> ChunkStore:
        return ChunkStore.open("memory://", secret=secret)

    backbone, path = speaking("headers"), tmp_path / "s"
    chat = ChatSession(backbone, store("a secret of many bytes"), policy=EXACT)
    chat.send(TALK[:1], **GREEDY)
    chat.save(path)
    assert ChatSession.load(path, backbone, store("a secret of many bytes")).messages == chat.messages
    for other in ("another of many bytes!", None):
        with pytest.raises(ForeignObject, match="secret"):
            ChatSession.load(path, backbone, store(other))
    body = _body_in(path)
    body["said"][0]["content"] = "never said"
    SESSION.publish(path, sign_document(body, store(None)))
    with pytest.raises(ForeignObject, match="secret"):
        ChatSession.load(path, backbone, store("a secret of many bytes"))


def _body_in(path: Path) -> dict:
    """The document of a saved session without its signature."""
    body = SESSION.read(path).document
    del body["signature"]
    return body


def _changed(body: dict, **fields) -> dict:
    return {**body, **fields}


def _with_window(body: dict, **fields) -> dict:
    return {**body, "window": {**body["window"], **fields}}


def _with_prompt(body: dict, **fields) -> dict:
    layout = body["window"]["layout"]
    return _with_window(body, layout={**layout, "prompt": {**layout["prompt"], **fields}})


MALFORMED: dict[str, Callable[[dict], object]] = {
    "newer": lambda body: _changed(body, version=SESSION.version + 1),
    "a word for a version": lambda body: _changed(body, version="two"),
    "a list": lambda body: [body],
    "nothing": lambda body: {"version": SESSION.version},
    "newer policy": lambda body: _changed(body, policy={"later": 1}),
    "messages": lambda body: _changed(body, messages=5),
    "a message": lambda body: _changed(body, messages=["hello"]),
    "turn": lambda body: _changed(body, turn="one"),
    "mode": lambda body: _changed(body, mode="later"),
    "tenant": lambda body: _changed(body, tenant=None),
    "id": lambda body: _changed(body, id=7),
    "guarantee": lambda body: _with_window(body, guarantee="perfect"),
    "layout": lambda body: _with_window(body, layout={}),
    "runs": lambda body: _with_window(body, layout={**body["window"]["layout"], "runs": [[0, 99]]}),
    "segments": lambda body: _with_prompt(body, segments=[{}]),
    "a gap": lambda body: _with_prompt(
        body,
        segments=[{**s, "start": s["start"] + 1} for s in body["window"]["layout"]["prompt"]["segments"]],
    ),
    "window": lambda body: _with_window(body, folder="../elsewhere"),
    "a number for a word": lambda body: _with_window(body, sha256=7),
    "a share of a token": lambda body: _changed(body, ids=[0.5]),
    "a word for a list": lambda body: _changed(body, changes="ab"),
    "a field of no version": lambda body: _changed(body, later=1),
    "changes": lambda body: _changed(body, changes=[1, 2]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Path]:
    """The directory of two saved sessions, and the document of the one named "bad"."""
    root = tmp_path_factory.mktemp("saved")
    pool = opened(root)
    for name in ("bad", "good"):
        pool.send([{"role": "user", "content": f"{name} it is"}], name, **GREEDY)
    pool.flush()
    return root, _folder(root, "bad") / "session.safetensors"


def _answered_beside(root: Path, where: Path, caplog) -> str:
    """The other session is answered by id and by history, and the bad one is named and passed over.

    Returns the answer to a whole history under the bad one's id.
    """
    caplog.clear()
    pool = opened(root, min_tokens=1)
    assert pool.send("more", "good", **GREEDY).session_id == "good"
    pool.send([{"role": "user", "content": "another talk"}], **GREEDY)
    assert str(where.parent) in caplog.text
    assert "bad" not in pool.list_saved() and "good" in pool.list_saved()
    with pytest.raises(KameraError):
        pool.send("more", "bad", **GREEDY)
    return pool.send([{"role": "user", "content": "bad it is"}], "bad", **GREEDY).text


def _answered_alone(root: Path) -> str:
    return opened(root / "none").send([{"role": "user", "content": "bad it is"}], **GREEDY).text


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_document_under_a_valid_seal_concerns_its_own_session_only(saved, kind, caplog, tmp_path):
    root = shutil.copytree(saved[0], tmp_path / "sessions")
    where = root / saved[1].relative_to(saved[0])
    changed, store = MALFORMED[kind](_body_in(where.parent)), ChunkStore.open("memory://")
    whole = sign_document(changed, store) if isinstance(changed, dict) else Saved(changed, {})
    SESSION.publish(where.parent, whole)
    assert _answered_beside(root, where, caplog) == _answered_alone(root)

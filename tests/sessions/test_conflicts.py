"""Whatever was answered stays: of two that continue one session, none replaces what the other said."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from kamera import ChunkStore
from kamera.edits import Directive
from kamera.errors import SessionConflict
from kamera.sessions import ChatSession
from tests.content.templates import TALK
from tests.engines.compare import relative
from tests.sessions.rig import plain_logits, session, speaking
from tests.sessions.test_pool_saving import GREEDY, HELLO


def _said(messages: Iterable[dict]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "user"]


def _agrees(chat: ChatSession) -> None:
    assert relative(chat.next_token_logits(), plain_logits(chat.backbone, chat.messages)) <= 1e-4


def test_of_two_loaded_sessions_the_second_to_save_is_refused(tmp_path):
    backbone, path = speaking("headers"), tmp_path / "s"
    chat = session(backbone)
    chat.send(TALK[:1], **GREEDY)
    chat.save(path)
    one, two = (ChatSession.load(path, backbone, ChunkStore.open("memory://")) for _ in range(2))
    one.edit([Directive(1, 2, "nothing", unit="messages")])
    one.save(path)
    two.send("from two", **GREEDY)
    with pytest.raises(SessionConflict, match="continued elsewhere"):
        two.save(path)
    assert ChatSession.load(path, backbone, ChunkStore.open("memory://")).messages == one.messages
    two.save(tmp_path / "other")
    one.save(path)  # again: it goes on from itself
    other = session(backbone)
    other.send(HELLO, **GREEDY)
    other.save(path)  # an unrelated session takes the directory, as it is told to
    assert _said(ChatSession.load(path, backbone, other.store).messages) == ["hello"]


@pytest.mark.few(1)
@pytest.mark.parametrize("threads", [2, 4])
def test_every_turn_of_every_thread_on_one_session_stays(threads):
    chat = session(speaking("headers"))
    chat.send(HELLO, **GREEDY)
    ready, failed = threading.Barrier(threads), []

    def client(number: int) -> None:
        try:
            ready.wait()
            for turn in range(2):
                chat.send(f"{number} {turn}", **GREEDY)
        except BaseException as error:
            failed.append(error)

    clients = [threading.Thread(target=client, args=(i,)) for i in range(threads)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert failed == []
    said = _said(chat.messages)[1:]
    assert sorted(said) == sorted(f"{i} {turn}" for i in range(threads) for turn in range(2))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * (2 * threads + 1)
    _agrees(chat)

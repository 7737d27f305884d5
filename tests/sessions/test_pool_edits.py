"""Edits and scratch of pooled sessions by their ids; what clients do to their own past."""

from __future__ import annotations

import pytest

from kamera import ChunkStore
from kamera.edits import Directive
from kamera.errors import UnknownSession
from kamera.sessions import SessionPool
from tests.sessions.rig import EXACT, session, speaking

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


@pytest.mark.slow
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

"""A forked child never waits for a thread of its parent: what it has is whole, or is refused by name."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kamera.window import SealedFile
from tests.sessions.test_pool_saving import GREEDY, HELLO, opened

DEADLINE = 60.0  # seconds; a child that works takes some tenths of one


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` returns in a forked child, or the name of what it raises; ``hung`` past the deadline."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    try:
        return os.read(read, 4096).decode() if select.select([read], [], [], DEADLINE)[0] else "hung"
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def stopped(monkeypatch, owner: object, name: str) -> Iterator[threading.Event]:
    """A function that waits, once background work calls it, until the block ends; an event that says so."""
    reached, go, real = threading.Event(), threading.Event(), getattr(owner, name)

    def waiting(*arguments, **named):
        if threading.current_thread() is threading.main_thread():  # a turn is written before it is told
            return real(*arguments, **named)
        reached.set()
        assert go.wait(DEADLINE)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, waiting)
    try:
        yield reached
    finally:
        go.set()


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["flush", "send", "session", "list_saved"])
def test_a_child_forked_while_a_save_is_pending_does_not_wait_for_it(tmp_path, monkeypatch, call):
    pool = opened(tmp_path)
    pool.send(HELLO, "s", **GREEDY)
    pool.flush()
    with stopped(monkeypatch, SealedFile, "publish") as writing:
        pool.send("slowly", "s", **GREEDY)
        assert writing.wait(DEADLINE)
        calls = {
            "flush": pool.flush,
            "send": lambda: pool.send("in the child", "s", max_new_tokens=1).text,
            "session": lambda: len(pool.session("s").messages),
            "list_saved": pool.list_saved,
        }
        said = in_child(calls[call])
    pool.flush()
    store = "ForkedStore: this store was opened before process"
    assert said.startswith({"flush": "None", "send": store, "session": "4", "list_saved": "['s']"}[call])
    assert [m["role"] for m in opened(tmp_path).session("s").messages] == ["user", "assistant"] * 2

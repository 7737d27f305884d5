"""A forked child never waits for a thread of its parent: what it has is whole, or is refused by name."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kamera import KameraWindow, forks
from kamera.window import SealedFile
from tests.sessions.rig import seeing, speaking
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
    """A function that waits, once it is called, until the end of the block; an event that says it was."""
    reached, go, real = threading.Event(), threading.Event(), getattr(owner, name)

    def waiting(*arguments, **named):
        reached.set()
        assert go.wait(DEADLINE)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, waiting)
    try:
        yield reached
    finally:
        go.set()


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


def test_a_save_under_way_holds_up_no_other_thread(tmp_path, monkeypatch):
    pool = opened(tmp_path)
    with stopped(monkeypatch, SealedFile, "publish") as writing:
        pool.send(HELLO, "s", **GREEDY)
        assert writing.wait(DEADLINE)
        asked = threading.Thread(target=lambda: pool.session("s").next_token_logits("now?"), daemon=True)
        asked.start()
        asked.join(DEADLINE / 2)
        waits = asked.is_alive()
    pool.flush()
    assert not waits


def test_a_window_that_another_thread_was_changing_is_refused_in_a_child(monkeypatch):
    from kamera import ChunkStore
    from kamera.window import run as module

    backbone = speaking("headers")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), "be brief")
    window.append("one text")
    other = window.fork()
    with stopped(monkeypatch, module._PlanRun, "run_steps") as reached:
        thread = threading.Thread(target=window.append, args=("another",))
        thread.start()
        assert reached.wait(DEADLINE)
        said = in_child(lambda: window.next_token_logits("what?").shape)
        beside = in_child(lambda: other.next_token_logits("what?").shape)
    thread.join()
    assert said.startswith("ForkedStore: another thread was using this window when process")
    assert beside == str(other.next_token_logits("what?").shape)


def test_a_session_answering_elsewhere_is_no_obstacle_in_a_child(tmp_path):
    pool, begun, go = opened(tmp_path, seeing()), threading.Event(), threading.Event()
    pool.send(HELLO, "s", **GREEDY)
    pool.flush()
    chat = pool.session("s")

    class Slow:
        def put(self, value) -> None:
            begun.set()
            assert go.wait(DEADLINE)

        def end(self) -> None:
            pass

    thread = threading.Thread(target=chat.send, args=("slow",), kwargs={**GREEDY, "streamer": Slow()})
    thread.start()
    assert begun.wait(DEADLINE)
    try:
        said = in_child(lambda: len(chat.send("in the child", max_new_tokens=1).text) >= 0)
    finally:
        go.set()
        thread.join()
    assert said == "True" or said.startswith("ForkedStore")


@pytest.mark.parametrize("guarded", ["", "this thing"])
def test_a_lock_of_another_thread_is_free_or_refused_in_a_child(guarded):
    lock, free, reached, go = forks.Lock(guarded), forks.Lock(guarded), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            reached.set()
            go.wait(DEADLINE)

    def take(held: forks.Lock) -> str:
        with held:
            return "taken"

    thread = threading.Thread(target=hold)
    thread.start()
    assert reached.wait(DEADLINE)
    with free:
        said = [in_child(lambda held=held: take(held)) for held in (lock, free)]
    go.set()
    thread.join()
    assert said[1] == "taken"
    assert (
        said[0].startswith(f"ForkedStore: another thread was using {guarded}")
        if guarded
        else said[0] == "taken"
    )
    assert take(lock) == "taken"

"""A pool's sessions outlive it: another process, an eviction, a kill, a damaged file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kamera.sessions import ChatSession, SessionPool
from kamera.store import ChunkStore
from kamera.window import former_of
from tests.content.templates import TALK, screens
from tests.engines.compare import relative
from tests.killing import Countdown, die, in_child
from tests.sessions.rig import EXACT, plain_logits, seeing, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}
HELLO = [{"role": "user", "content": "hello"}]


def opened(folder: Path, backbone=None, policy=EXACT, tenant: str = "", **options) -> SessionPool:
    options = {"min_tokens": 1, **options}
    store = ChunkStore.open("memory://", tenant=tenant)
    return SessionPool(backbone or speaking("headers"), store, policy=policy, save=folder, **options)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The sessions of a process that was killed right after an answer."""
    folder = tmp_path_factory.mktemp("sessions")

    def work(_) -> None:
        pool = opened(folder, seeing())
        pool.send(screens(2), "mine", **GREEDY)
        pool.send(screens(3, 20), "other", **GREEDY)
        pool.send("and now?", "mine", **GREEDY)
        pool.send("and then?", "mine", **GREEDY)
        die()

    assert in_child(work).killed
    return folder


@pytest.fixture
def left_behind(killed, tmp_path) -> Path:
    """The same, to be written to."""
    return shutil.copytree(killed, tmp_path / "sessions")


def _agrees(chat: ChatSession, messages) -> None:
    assert relative(chat.next_token_logits(messages), plain_logits(chat.backbone, messages)) <= 1e-4


def test_a_killed_process_loses_at_most_the_last_turn(left_behind):
    pool = opened(left_behind, seeing())
    assert "mine" in pool.list_saved() and len(pool.list_saved()) == 2
    said = [m["content"] for m in pool.session("mine").messages if m["role"] == "user"]
    assert "and now?" in said and said[-1] in ("and now?", "and then?")


def test_another_process_goes_on_by_id_and_edits_there(left_behind):
    pool = opened(left_behind, seeing())
    turn = pool.send("go on", "mine", **GREEDY)
    assert turn.session_id == "mine" and turn.report.vision_encodes == 0 and turn.report.kept > 50
    history = pool.session("mine").messages
    del history[1:3]
    turn = pool.send([*history, {"role": "user", "content": "what now?"}], "mine", **GREEDY)
    assert turn.report.vision_encodes == 0 and turn.report.left > 20
    _agrees(pool.session("mine"), pool.session("mine").messages)
    counted = pool.metrics()
    assert (counted.resumed, counted.by_id, counted.opened) == (1, 2, 0)


@pytest.mark.parametrize("edited", [False, True])
def test_another_process_finds_a_session_by_its_history(left_behind, edited):
    pool = opened(left_behind, seeing())
    history = [*pool.session("other").messages, {"role": "user", "content": "next"}]
    if edited:
        del history[3:5]
    turn = pool.send(history, **GREEDY)
    assert turn.session_id == "other" and turn.report.vision_encodes == 0 and turn.report.kept > 50
    _agrees(pool.session("other"), history)
    counted = pool.metrics()
    assert (counted.resumed, counted.by_prefix, counted.by_edit) == (1, not edited, edited)


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_kill_inside_of_a_save_leaves_a_whole_session(tmp_path, phase):
    backbone, n = speaking("headers"), 0
    while True:
        n += 1
        folder = tmp_path / str(n)

        def work(tell, folder=folder, n=n):
            pool = opened(folder, backbone)
            pool.send(HELLO, "s", **GREEDY)
            pool.flush()
            with Countdown(n, phase).over(os, "replace", "fsync"):
                pool.send("again", "s", **GREEDY)
                pool.flush()

        ended = in_child(work)
        pool = opened(folder, backbone)
        turns = len(pool.session("s").messages)
        assert turns == 4 if not ended.killed else turns in (2, 4)
        _agrees(pool.session("s"), pool.session("s").messages)
        if not ended.killed:
            break
    assert n > 4


def test_an_evicted_session_comes_back_from_the_disk(tmp_path):
    pool = opened(tmp_path, max_sessions=1)
    for name in ("a", "b"):
        pool.send([{"role": "user", "content": f"{name} is a letter"}], name, **GREEDY)
    assert len(pool) == 1 and pool.metrics().evicted_count == 1
    turn = pool.send("more", "a", **GREEDY)
    assert (
        turn.report.kept > 0 and [m["role"] for m in pool.session("a").messages] == ["user", "assistant"] * 2
    )
    assert pool.metrics().resumed == 1 and len(pool) == 1


def test_a_damaged_window_is_prefilled_again(tmp_path):
    pool = opened(tmp_path)
    pool.send(TALK[:1], "s", **GREEDY)
    pool.flush()
    (window,) = tmp_path.glob("*/window-*/window.safetensors")
    window.write_bytes(window.read_bytes()[:-9])
    pool = opened(tmp_path)
    turn = pool.send("more", "s", **GREEDY)
    assert turn.report.kept <= former_of(pool.session("s").window).anchor.length
    assert len(pool.session("s").messages) == 4
    _agrees(pool.session("s"), pool.session("s").messages)


def test_the_sessions_saved_longest_ago_leave_a_full_disk(tmp_path):
    first = opened(tmp_path)
    first.send(HELLO, "a", **GREEDY)
    first.flush()
    size = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    pool = opened(tmp_path, max_saved_bytes=size * 5 // 2)
    for name in ("b", "c"):
        pool.send([{"role": "user", "content": f"hell{name}"}], name, **GREEDY)
        pool.flush()
    assert pool.list_saved() == ["b", "c"] and pool.metrics().evicted_saved == 1
    tight = opened(tmp_path, max_saved_bytes=1)
    tight.send("more", "b", **GREEDY)
    tight.flush()
    assert tight.list_saved() == ["b"] and len(tight.session("b").messages) == 4
    for wrong in ({"save": None, "max_saved_bytes": 5}, {"max_saved_bytes": 0}):
        with pytest.raises(ValueError, match="max_saved_bytes"):
            SessionPool(speaking("headers"), ChunkStore.open("memory://"), **{"save": tmp_path, **wrong})

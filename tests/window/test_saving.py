"""Saves that meet: whatever happens, a directory holds one whole window."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from kamera import ChunkStore, KameraWindow
from tests.window.rig import Snapshot, make, over, rig, same_bits

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def windows():
    """Windows of one store that differ in length and content."""
    backbone, chunks = rig(FAMILY)
    store = ChunkStore.open("memory://")
    return [make(backbone, store, *chunks[i:]) for i in range(3)]


def one_of(loaded: KameraWindow, windows) -> bool:
    return any(
        tuple(s.chunk_id for s in w.slots) == tuple(s.chunk_id for s in loaded.slots)
        and all(
            same_bits(a.span.kv, b.span.kv)
            for a, b in zip(w._state.residents, loaded._state.residents, strict=True)
        )
        for w in windows
    )


def test_saves_of_many_threads_leave_one_whole_window(windows, tmp_path):
    path = tmp_path / "w"
    windows[0].save(path)
    errors: list[BaseException] = []
    loads: list[bool] = []
    saving = threading.Event()

    def save(window: KameraWindow) -> None:
        try:
            for _ in range(15):
                window.save(path)
        except BaseException as error:
            errors.append(error)

    def load() -> None:
        while not (saving.is_set() and loads):
            try:
                loads.append(one_of(KameraWindow.load(path, *over(windows[0])), windows))
            except BaseException as error:
                errors.append(error)
                return

    savers = [threading.Thread(target=save, args=(w,)) for w in (*windows, windows[0])]
    reader = threading.Thread(target=load)
    for thread in (*savers, reader):
        thread.start()
    for thread in savers:
        thread.join()
    saving.set()
    reader.join()
    assert not errors
    assert loads and all(loads)
    assert one_of(KameraWindow.load(path, *over(windows[0])), windows)
    assert [p.name for p in path.iterdir()] == ["window.safetensors"]


def _save_again(path: Path, count: int, first: int) -> None:
    backbone, chunks = rig(FAMILY)
    window = make(backbone, None, *chunks[first:])
    for _ in range(count):
        window.save(path)


def test_saves_of_two_processes_leave_one_whole_window(windows, tmp_path):
    path = tmp_path / "w"
    windows[0].save(path)
    spawned = multiprocessing.get_context("fork")
    processes = [spawned.Process(target=_save_again, args=(path, 40, first)) for first in (1, 2)]
    for process in processes:
        process.start()
    loads = 0
    while any(p.is_alive() for p in processes) or not loads:
        assert one_of(KameraWindow.load(path, *over(windows[0])), windows)
        loads += 1
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0]
    assert one_of(KameraWindow.load(path, *over(windows[0])), windows[1:])


@pytest.mark.few(2)
@pytest.mark.parametrize("at", ["open", "fsync", "replace"])
def test_a_save_that_dies_leaves_the_old_window(windows, tmp_path, at):
    """In a child that is gone, without a word, at the step of that name."""
    path = tmp_path / "w"
    windows[0].save(path)
    pid = os.fork()
    if pid == 0:
        setattr(os, at, lambda *a, **k: os._exit(9))
        try:
            windows[1].save(path)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    loaded = KameraWindow.load(path, *over(windows[0]))
    assert Snapshot.of(windows[0]).matches(loaded, numbers=False)
    windows[1].save(path)  # and what the dead one left aside goes with the next
    assert [p.name for p in path.iterdir()] == ["window.safetensors"]

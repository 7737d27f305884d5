"""A file appears whole or not at all, whoever dies; a lock has one holder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kamera import ChunkStore, SessionPool, files
from kamera.files import ASIDE, lock_path, publish_file, user_path
from tests.killing import die, in_child
from tests.sessions.rig import speaking


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with publish_file(path) as file:
        file.write(b"old")
    with pytest.raises(KeyError), publish_file(path) as file:
        file.write(b"half")
        assert path.read_bytes() == b"old"
        raise KeyError
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])
    with publish_file(path, 0o640) as file:
        file.write(b"new")
    assert (path.read_bytes(), names(tmp_path), path.stat().st_mode & 0o7777) == (b"new", ["a"], 0o640)


def test_what_a_killed_writer_left_goes_with_the_next_and_what_is_being_written_stays(tmp_path: Path) -> None:
    def dies(tell: object) -> None:
        with publish_file(tmp_path / "a") as file:
            file.write(b"half")
            die()

    assert in_child(dies).killed
    assert [name.startswith(ASIDE) for name in names(tmp_path)] == [True]
    with publish_file(tmp_path / "b") as one:
        one.write(b"1")
        with publish_file(tmp_path / "c") as other:
            other.write(b"2")
        assert len(names(tmp_path)) == 2, "the dead one's is gone, that of b is not"
    assert names(tmp_path) == ["b", "c"]


def test_a_file_that_is_swept_before_it_is_locked_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []
    really = files.try_lock

    def after_another(descriptor: int) -> bool:
        if not swept:
            swept.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
            assert really(swept[0])
        return really(descriptor)

    monkeypatch.setattr(files, "try_lock", after_another)
    with publish_file(tmp_path / "a") as file:
        file.write(b"whole")
        assert len(names(tmp_path)) == 2, "the other has yet to remove the first one"
    os.close(swept[0])
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_where_nothing_can_be_locked_no_file_and_no_descriptor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files, "try_lock", unsupported)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no locks"), publish_file(tmp_path / "a"):
            pass
    assert names(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == before


def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    for path, flags in ((tmp_path, os.O_RDONLY), (tmp_path / "lock", os.O_RDWR | os.O_CREAT)):
        says = f"{path.name} has been locked.*{os.getpid()}"
        with lock_path(path, flags=flags), pytest.raises(TimeoutError, match=says):
            lock_path(path, 0.01, flags).__enter__()
        with lock_path(path, 0.01, flags):
            pass


def test_a_path_of_a_user_is_absolute_and_knows_the_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    assert user_path("a/b") == tmp_path / "a" / "b" and user_path(Path("~/x")) == Path("/home/ann/x")
    with pytest.raises(ValueError, match="no path"):
        user_path("")


def test_stores_sessions_windows_and_traces_stay_where_they_are_if_the_working_folder_changes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    hello, options = [{"role": "user", "content": "hello"}], {"max_new_tokens": 1, "do_sample": False}
    with ChunkStore.open("store") as store:
        pool = SessionPool(speaking("headers"), store, save="saves", trace="trace.jsonl")
        pool.send(hello, "one", **options)
        monkeypatch.chdir(tmp_path / "other")
        pool.send("and now?", "one", **options)
        pool.send(hello, "two", **options)
        pool.flush()
        assert pool.list_saved() == ["one", "two"]
    assert list((tmp_path / "other").iterdir()) == []
    kept = {"other", "store", "saves", "saves-turns", "trace.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) >= 3

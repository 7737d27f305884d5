from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk, StoreError, StoreVersionError
from kamera.ops.patch import LowRank, Patch
from kamera.store import ChunkStore, Context, PatchRecord
from kamera.store import format as object_format
from kamera.store.disk.files import ObjectFiles
from kamera.store.format import FORMAT_VERSION, decode, encode

from .builders import CONTEXT, assert_same, canonical, join, patch, split

CHUNK = "c" * 64


def file_of(root: Path, key: str) -> Path:
    return root / "objects" / key[:2] / f"{key}.safetensors"


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def drop_index(root: Path) -> None:
    for path in root.glob("index.sqlite*"):
        path.unlink()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_was_put_is_there_after_reopening(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
        store.put_patch(patch())
    with ChunkStore.open(root) as store:
        got, fixed = (
            store.get_canonical(CONTEXT, CHUNK),
            store.get_patch(CONTEXT, CHUNK, ("x", "y")),
        )
        assert_same(got, canonical())
        assert_same(fixed, patch())
        assert len(store.ls()) == 2


def test_files_and_folders_are_the_owners_alone(root: Path) -> None:
    old = os.umask(0)
    try:
        with ChunkStore.open(root) as store:
            store.put_canonical(canonical())
            paths = [root, *root.rglob("*")]
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in paths}
    finally:
        os.umask(old)
    assert {m for n, m in modes.items() if "." in n} == {0o600}
    assert {m for n, m in modes.items() if "." not in n} == {0o700}


def test_a_lost_index_is_rebuilt_from_the_files(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
        store.put_patch(patch(formed="survivor"))
        before = store.ls()
    drop_index(root)
    with ChunkStore.open(root) as store:
        assert store.ls() == before
        assert store.contexts_of(CHUNK) == [CONTEXT]


@pytest.mark.parametrize("damage", ["garbage", "truncated", "half a page", "another schema"])
def test_an_unreadable_index_is_rebuilt_from_the_files(root: Path, damage: str) -> None:
    with ChunkStore.open(root) as store:
        for i in range(60):
            store.put_patch(patch(antecedents=(str(i),)))
        before = store.ls()
    path = root / "index.sqlite"
    data = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "half a page":
        path.write_bytes(data[:6000] + b"\xff" * 6000 + data[12000:])
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    with ChunkStore.open(root) as store:
        assert store.ls() == before


def test_an_interrupted_rebuild_is_done_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
        store.put_patch(patch())
    drop_index(root)
    peek = ObjectFiles.peek
    calls: list[str] = []

    def dies(self: Any, key: str) -> Any:
        calls.append(key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peek(self, key)

    monkeypatch.setattr(ObjectFiles, "peek", dies)
    with pytest.raises(KeyboardInterrupt):
        ChunkStore.open(root)
    monkeypatch.undo()
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 2


def test_an_interrupted_rebuild_keeps_the_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
        monkeypatch.setattr(ObjectFiles, "peek", dies)
        with pytest.raises(KeyboardInterrupt):
            store.rebuild_index()
        assert len(store.ls()) == 1


def test_a_file_without_a_row_is_found_and_its_row_repaired(root: Path) -> None:
    data = encode(canonical(), 7.0)
    with ChunkStore.open(root) as store:
        for record, read in (
            (canonical(), lambda: store.get_canonical(CONTEXT, CHUNK)),
            (patch(), lambda: store.patch_info(CONTEXT, CHUNK, ("x", "y"))),
        ):
            path = file_of(root, record.key)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data if record.kind == "canonical" else encode(record, 8.0))
            assert record.key not in [i.key for i in store.ls()]
            assert read() is not None
            assert next(i for i in store.ls() if i.key == record.key).bytes == path.stat().st_size


def test_a_row_without_its_file_is_a_miss_and_goes(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put_canonical(canonical())
        file_of(root, key).unlink()
        assert len(store.ls()) == 1
        assert not store.has_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert store.ls() == []


def test_a_row_of_the_file_before_is_repaired(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As left by a process that died between the new file and its row."""
    with ChunkStore.open(root) as store:
        store.put_patch(patch(rank=2))
        monkeypatch.setattr(store._disk.index, "put", lambda *_: None)  # type: ignore[union-attr]
        store.put_patch(patch(rank=5))
        monkeypatch.undo()
        info = store.patch_info(CONTEXT, CHUNK, ("x", "y"))
        assert info is not None and info.rank == 5
        assert [i.rank for i in store.ls()] == [5]


def test_a_damaged_object_is_refused_quarantined_and_then_a_miss(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put_canonical(canonical())
        store.put_patch(patch())
        path = file_of(root, key)
        flip(path)
        damaged = path.read_bytes()
        with pytest.raises(CorruptChunk, match=r"digest.*quarantine"):
            store.get_canonical(CONTEXT, CHUNK)
        assert [p.read_bytes() for p in (root / "quarantine").glob("*.safetensors")] == [damaged]
        assert not path.exists()
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert [i.kind for i in store.ls()] == ["exact"]
        store.put_canonical(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_quarantine_keeps_every_damaged_file(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for _ in range(3):
            flip(file_of(root, store.put_canonical(canonical())))
            with pytest.raises(CorruptChunk):
                store.get_canonical(CONTEXT, CHUNK)
    assert len(list((root / "quarantine").glob("*.safetensors"))) == 3


def test_a_file_under_another_keys_name_is_refused(root: Path) -> None:
    with ChunkStore.open(root) as store:
        other = canonical("d" * 64)
        path = file_of(root, other.key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file_of(root, store.put_canonical(canonical())).read_bytes())
        store.rebuild_index()
        assert len(store.ls()) == 1
        with pytest.raises(CorruptChunk, match="expected"):
            store.get_canonical(CONTEXT, "d" * 64)


def test_verify_reads_everything_and_quarantines_what_is_damaged(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
        bad = store.put_patch(patch())
        flip(file_of(root, bad), 200)
        record = patch(antecedents=("newer",))
        outer, header, rest = split(encode(record, 7.0))
        newer = file_of(root, record.key)
        newer.parent.mkdir(exist_ok=True)
        newer.write_bytes(join(outer, header | {"format": FORMAT_VERSION + 1}, rest))
        report = store.verify()
        assert report.ok == 1
        assert [bad in line for line in report.quarantined] == [True]
        assert [record.key in line for line in report.refused] == [True]
        assert newer.exists()
        assert store.verify().quarantined == ()


def test_an_object_of_a_newer_format_is_refused_and_left_in_place(root: Path) -> None:
    with ChunkStore.open(root) as store:
        path = file_of(root, store.put_canonical(canonical()))
        outer, header, rest = split(path.read_bytes())
        path.write_bytes(join(outer, header | {"format": FORMAT_VERSION + 1}, rest))
        for _ in range(2):
            with pytest.raises(StoreVersionError, match=f"format {FORMAT_VERSION + 1}"):
                store.get_canonical(CONTEXT, CHUNK)
        assert path.exists() and not list((root / "quarantine").iterdir())


def test_a_newer_store_is_refused_and_left_untouched(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put_canonical(canonical())
    (root / "kamera-store.json").write_text('{"format": 2, "sharding": "new"}')
    drop_index(root)
    before = snapshot(root)
    with pytest.raises(StoreVersionError, match=r"format 2.*up to 1"):
        ChunkStore.open(root)
    assert snapshot(root) == before


def test_a_folder_that_is_no_store_is_refused_and_left_untouched(root: Path) -> None:
    root.mkdir()
    (root / "photo.jpg").write_bytes(b"jpeg")
    with pytest.raises(StoreError, match="no kamera store"):
        ChunkStore.open(root)
    assert [p.name for p in root.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "1"}', '{"format": 0}'])
def test_a_damaged_marker_is_refused(root: Path, text: str) -> None:
    ChunkStore.open(root).close()
    (root / "kamera-store.json").write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        ChunkStore.open(root)


def test_a_file_where_the_store_should_be_is_refused(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(StoreError, match="cannot open"):
        ChunkStore.open(root)


@pytest.mark.parametrize("call", ["replace", "fsync", "write"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_is_interrupted_leaves_the_old_object(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    with ChunkStore.open(root) as store:
        store.put_patch(patch(rank=2))
        before = snapshot(root / "objects")
        monkeypatch.setattr(os, call, fails)
        with pytest.raises((StoreError, KeyboardInterrupt)):
            store.put_patch(patch(rank=7))
        with pytest.raises((StoreError, KeyboardInterrupt)):
            store.put_canonical(canonical())
        monkeypatch.undo()
        assert snapshot(root / "objects") == before
        # where the names cannot be synced the claim stays, for the next one to see to
        assert {path.suffix for path in (root / "tmp").iterdir()} <= {".lock"}
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 2
        assert store.get_canonical(CONTEXT, CHUNK) is None
        store.put_canonical(canonical())
        store.put_patch(patch(rank=7))
        assert list((root / "tmp").iterdir()) == []


def test_the_bytes_are_on_the_disk_before_the_name_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            events.append(name)
            return real(*arguments, **named)

        return call

    with ChunkStore.open(root) as store:
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, spy(name))
        store.put_patch(patch(rank=2))
    assert events == ["fsync", "fsync", "replace", "fsync"]  # objects/, file, objects/ab/


def test_leftovers_of_dead_writers_are_ignored(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put_canonical(canonical())
    (root / "tmp" / f"{key}.1.dead").write_bytes(b"half")
    (file_of(root, key).parent / "notes.safetensors").write_bytes(b"not ours")
    drop_index(root)
    with ChunkStore.open(root) as store:
        assert [i.key for i in store.ls()] == [key]
        assert store.verify().ok == 1 and store.verify().quarantined == ()


def test_a_slow_reader_does_not_bring_back_the_row_of_the_old_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put_patch(patch(rank=1))

        def overtaken(*arguments: Any, **named: Any) -> Any:
            monkeypatch.undo()
            store.put_patch(patch(rank=2))
            return decode(*arguments, **named)

        monkeypatch.setattr(object_format, "decode", overtaken)
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 1
        assert [i.rank for i in store.ls()] == [2]


def test_a_damaged_file_that_was_just_replaced_is_not_quarantined(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        flip(file_of(root, store.put_patch(patch(rank=1))))

        def overtaken(*arguments: Any, **named: Any) -> Any:
            monkeypatch.undo()
            store.put_patch(patch(rank=2))
            return decode(*arguments, **named)

        monkeypatch.setattr(object_format, "decode", overtaken)
        with pytest.raises(CorruptChunk):
            store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 2


def test_a_miss_does_not_drop_the_row_of_an_object_that_just_came(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as store:

        def overtaken(*_: Any) -> None:
            monkeypatch.undo()
            store.put_patch(patch())

        monkeypatch.setattr(ObjectFiles, "stamp", overtaken)
        assert not store.has_patch(CONTEXT, CHUNK, ("x", "y"))
        assert len(store.ls()) == 1


def test_readers_see_the_old_patch_or_the_new_one_while_threads_write(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put_patch(patch(rank=1))
        done = threading.Event()
        seen: set[int] = set()

        def reads() -> None:
            while not done.is_set():
                got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
                assert got is not None
                seen.add(got.patch.rank)

        def writes(rank: int) -> None:
            store.put_canonical(canonical(str(rank)))
            store.put_patch(patch(rank=rank))

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(reads) for _ in range(2)]
            try:
                list(pool.map(writes, range(1, 33)))
            finally:
                done.set()
            for reader in readers:
                reader.result()
        assert seen <= set(range(1, 33))
        assert len(store.ls("canonical")) == 32
        [row] = store.ls("exact")
        final = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert final is not None and row.rank == final.patch.rank
        assert store.verify().ok == 33 and list((root / "tmp").iterdir()) == []


def fill(root: Path, me: int, ready: Any) -> None:
    ready.wait()
    with ChunkStore.open(root) as store:
        for i in range(15):
            for name in ("shared", f"own{me}"):
                factors = LowRank(torch.full((3, me), me), torch.full((8, me), me))
                fixed = Patch(({"v": factors},))
                store.put_patch(PatchRecord(f"{name}{i}", Context("f", "a"), (), "exact", fixed, ""))


def test_two_processes_make_and_fill_one_store(root: Path) -> None:
    fork = multiprocessing.get_context("fork")  # the others import torch once more, for seconds
    ready = fork.Barrier(2)
    writers = [fork.Process(target=fill, args=(root, me, ready)) for me in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 45
        assert store.verify().ok == 45
        for i in range(15):
            got = store.get_patch(Context("f", "a"), f"shared{i}", ())
            assert got is not None
            left = got.patch.layers[0]["v"].left
            assert left.shape[1] == int(left[0, 0])


def test_another_process_view_of_a_replacement_and_a_deletion(root: Path) -> None:
    with ChunkStore.open(root) as one, ChunkStore.open(root) as two:
        key = one.put_patch(patch(rank=1))
        assert one.get_patch(CONTEXT, CHUNK, ("x", "y")) is not None
        two.put_patch(patch(rank=4))
        got = one.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 4
        assert two.delete(key)
        assert one.get_patch(CONTEXT, CHUNK, ("x", "y")) is None


def test_a_canonical_that_is_there_is_not_written_again(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put_canonical(canonical(seed=1))
        before = file_of(root, key).stat()
        assert store.put_canonical(canonical(seed=2)) == key
        after = file_of(root, key).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical(seed=1))


def test_a_directory_object_is_exactly_the_format(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put_canonical(canonical())
    assert_same(decode(file_of(root, key).read_bytes(), key, "here"), canonical())

"""A directory that several processes use: files are the truth, whatever becomes of the index."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore, Context, StoreAdmin
from tests.store.builders import CHUNK, CONTEXT, canonical, drop_index, file_of, patch

SECRET = b"s" * 32
ACME = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


FORK = multiprocessing.get_context("fork")  # other processes import torch once more, for seconds


# -- locks of a live database are nobody's to drop ---------------------------------------------------


def pin_in_threads(root: Path, me: int, ready: Any, told: Any) -> None:
    failed = []

    def pins(thread: int) -> None:
        try:
            with ChunkStore.open(root) as store:
                for i in range(8):
                    record = patch(antecedents=(str(me), str(thread), str(i)))
                    StoreAdmin(store).pin([store.put(record)])
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=pins, args=(n,)) for n in range(3)]
    ready.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.put(failed)


def test_pins_of_processes_and_threads_at_once_all_hold(root: Path) -> None:
    ChunkStore.open(root).close()
    ready, told = FORK.Barrier(3), FORK.Queue()
    running = [FORK.Process(target=pin_in_threads, args=(root, me, ready, told)) for me in range(3)]
    for child in running:
        child.start()
    assert [told.get(timeout=300) for _ in running] == [[]] * 3
    for child in running:
        child.join()
    with ChunkStore.open(root) as store:
        names = {info.key for info in store.ls()}
        assert len(names) == 72 and {pin.name for pin in StoreAdmin(store).pins.list()} == names
        assert StoreAdmin(store).gc(0).removed == ()


def list_when_asked(root: Path, asked: Any) -> None:
    with ChunkStore.open(root) as store:
        while asked.recv():
            asked.send(len(store.ls()))


def test_a_second_tenant_that_closes_takes_no_locks_away(root: Path) -> None:
    """Two connections of one process share their locks: closing any descriptor of the file drops them."""
    with ChunkStore.open(root) as mine:
        mine.put(canonical())
        database: Any = mine._disk.index._db  # type: ignore[union-attr]
        with database.writing():
            with ChunkStore.open(root, tenant="acme") as other:
                assert other.ls() == []
            rival = sqlite3.connect(root / "index.sqlite", timeout=0, isolation_level=None)
            elsewhere = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)"
                    ".execute('BEGIN IMMEDIATE')",
                    str(root / "index.sqlite"),
                ],
                capture_output=True,
                text=True,
            )
            rival.close()
        assert "locked" in elsewhere.stderr


def test_what_another_process_puts_is_listed_while_tenants_close(root: Path) -> None:
    with ChunkStore.open(root) as mine:
        mine.put(canonical())
        asking, asked = FORK.Pipe()
        reader = FORK.Process(target=list_when_asked, args=(root, asked))
        reader.start()
        asked.close()
        for number in range(20):
            mine.put(patch(antecedents=(str(number),)))
            ChunkStore.open(root, tenant="acme").close()
            asking.send(True)
            assert asking.recv() == number + 2
        asking.send(False)
        reader.join()
        assert reader.exitcode == 0


# -- what the index has lost -------------------------------------------------------------------------


def copied(root: Path, target: Path) -> None:
    target.mkdir()
    for path in root.glob("index.sqlite*"):
        shutil.copy(path, target)


@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_a_lost_tail_of_the_log_is_noticed(root: Path, kind: str) -> None:
    options: dict[str, Any] = {} if kind == "plain" else {"tenant": "acme", "secret": SECRET}
    context = CONTEXT if kind == "plain" else ACME
    with ChunkStore.open(root, **options) as store:
        folder = store._disk.root  # type: ignore[union-attr]
        for number in range(10):
            store.put(canonical(f"{number:064x}", context))
        copied(folder, root.parent / "before")
        for number in range(10, 40):
            store.put(canonical(f"{number:064x}", context))
        copied(folder, root.parent / "after")
    drop_index(folder)
    for path in (root.parent / "before").iterdir():
        shutil.copy(path, folder)
    with ChunkStore.open(root, **options) as store:
        assert len(store.ls()) == 40 and StoreAdmin(store).stats().canonicals == 40
        assert store.contexts_of(f"{39:064x}") == [context]
        assert StoreAdmin(store).copy(root.parent / "copy").canonicals == 40
        assert StoreAdmin(store).gc(0, dry_run=True).objects_before == 40


def test_an_index_of_a_backup_follows_the_files(root: Path) -> None:
    """Rows of what is gone, of what was replaced, and none of what is new; the folders' times are newer."""
    with ChunkStore.open(root) as store:
        gone = store.put(canonical("a" * 64))
        store.put(patch(rank=1))
        assert len(store.ls()) == 2
    copied(root, root.parent / "before")
    with ChunkStore.open(root) as store:
        store.put(patch(rank=7))
        store.put(canonical())
        assert StoreAdmin(store).delete(gone)
    drop_index(root)
    for path in (root.parent / "before").iterdir():
        shutil.copy(path, root)
    with ChunkStore.open(root) as store:
        assert {(info.kind, info.rank) for info in store.ls()} == {("canonical", None), ("exact", 7)}
        assert store.contexts_of("a" * 64) == []


def test_a_listing_of_an_unchanged_store_reads_no_header(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        for number in range(5):
            store.put(canonical(f"{number:064x}"))
        assert len(store.ls()) == 5
    with ChunkStore.open(root) as store:
        asked: list[str] = []
        files: Any = store._disk._files  # type: ignore[union-attr]
        monkeypatch.setattr(files, "row", lambda key: asked.append(key))
        assert len(store.ls()) == 5 and asked == []


def test_look_ups_by_key_need_no_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
        store.put(patch())
    drop_index(root)
    (root / "index.sqlite").mkdir()  # nothing that SQLite could open
    with ChunkStore.open(root, memory_limit=0) as store:
        assert store.has(CONTEXT, CHUNK) and store.get_canonical(CONTEXT, CHUNK) is not None
        assert store.info(CONTEXT, CHUNK, ("x", "y")) is not None
        assert store.put(canonical("d" * 64)) and store.has(CONTEXT, "d" * 64)
        assert len(store.ls()) == 3 and StoreAdmin(store).stats().patches == 1
        assert StoreAdmin(store).delete(key) and len(store.ls()) == 2
        assert StoreAdmin(store).verify().ok == 2
    (root / "index.sqlite").rmdir()
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 2


# -- rows that lie ------------------------------------------------------------------------------------

LIES = {
    "kind": "orbit",
    "chunk_id": "e" * 64,
    "fingerprint": "e" * 64,
    "anchor": "e" * 64,
    "tokens": 77,
    "base": "z",
    "said": "{}",
    "bytes": 77,
    "created": 7.0,
    "kv": "int8",
}


@pytest.mark.parametrize("column", LIES)
@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_verify_mends_whatever_a_row_says_wrongly(root: Path, kind: str, column: str) -> None:
    options: dict[str, Any] = {} if kind == "plain" else {"tenant": "acme", "secret": SECRET}
    context = CONTEXT if kind == "plain" else ACME
    with ChunkStore.open(root, **options) as store:
        key = store.put(patch(context=context))
        store.put(canonical(context=context))
        right = store.ls()
        path = store._disk.root / "index.sqlite"  # type: ignore[union-attr]
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE objects SET {column} = ? WHERE key = ?", (LIES[column], key))
    db.close()
    with ChunkStore.open(root, **options) as store:
        info = store.info(context, CHUNK, ("x", "y"))
        assert info is not None and (info.formed, info.rank) == ("exact", 2)
        StoreAdmin(store).verify()
        assert store.ls() == right
        assert StoreAdmin(store).stats().patches == 1 and StoreAdmin(store).census().chunks == 1


def test_a_forged_row_of_a_sealed_store_is_not_listed(root: Path) -> None:
    options: dict[str, Any] = {"tenant": "acme", "secret": SECRET}
    with ChunkStore.open(root, **options) as store:
        store.put(patch(context=ACME))
        right = store.ls()
        path = store._disk.root / "index.sqlite"  # type: ignore[union-attr]
    with sqlite3.connect(path) as db:
        db.execute("UPDATE objects SET said = replace(said, '\"rank\":2', '\"rank\":64')")
    db.close()
    with ChunkStore.open(root, **options) as store:
        assert store.ls() == right


def test_rows_lost_from_a_secondary_index_are_found_by_verify(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for number in range(5):
            store.put(canonical(f"{number:064x}"))
    with sqlite3.connect(root / "index.sqlite") as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, 'created, key)', 'created, key) ') WHERE 0")
        [[page]] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'by_age'")
        [[size]] = db.execute("PRAGMA page_size")
    db.close()
    with open(root / "index.sqlite", "r+b") as file:  # an empty page of an index, well formed
        file.seek((page - 1) * size)
        file.write(b"\x0a\x00\x00\x00\x00" + size.to_bytes(2, "big") + b"\x00" + bytes(size - 8))
    with ChunkStore.open(root) as store:
        assert store.ls() == []  # SQLite believes it
        StoreAdmin(store).verify()
        assert len(store.ls()) == 5


# -- nobody waits ------------------------------------------------------------------------------------


def test_readers_do_not_wait_for_a_writer_of_another_process(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(canonical())
        path = file_of(root, store.put(patch()))
        assert len(store.ls()) == 2
        drop_row = sqlite3.connect(root / "index.sqlite", isolation_level=None)
        drop_row.execute("DELETE FROM objects WHERE kind = 'exact'")
        drop_row.execute("BEGIN IMMEDIATE")  # what another process would hold, for as long as it likes
        got: list[object] = []

        def reads() -> None:
            got.append(store.get_canonical(CONTEXT, CHUNK))
            got.append(store.get_patch(CONTEXT, CHUNK, ("x", "y")))  # whose row would have to be mended
            got.append(store.info(CONTEXT, CHUNK, ("x", "y")))
            got.append(store.ls(limit=10))
            path.unlink()
            got.append(not store.has(CONTEXT, CHUNK, ("x", "y")))

        reading = threading.Thread(target=reads)
        reading.start()
        reading.join(120)
        stuck = reading.is_alive()
        drop_row.execute("ROLLBACK")
        drop_row.close()
        reading.join()
        assert not stuck and len(got) == 5 and all(got)


def test_a_rebuild_holds_the_index_for_a_folder_at_a_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(root) as other:
        for number in range(12):
            store.put(canonical(f"{number:064x}"))
        files: Any = store._disk._files  # type: ignore[union-attr]
        row, listed = files.row, []

        def puts_meanwhile(key: str) -> Any:
            other.put(patch(antecedents=(key,)))  # needs the index's own lock
            listed.append(len(other.ls()))
            return row(key)

        monkeypatch.setattr(files, "row", puts_meanwhile)
        rebuilding = threading.Thread(target=StoreAdmin(store).rebuild_index)
        rebuilding.start()
        rebuilding.join(300)
        monkeypatch.undo()
        assert not rebuilding.is_alive()
        assert len(listed) >= 12 and listed == sorted(listed) and listed[0] == 13
        assert (
            len(store.ls()) == len(other.ls()) == 12 + len({info.antecedents for info in store.ls("exact")})
        )


def test_forgetting_opens_only_what_is_forgotten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        for number in range(30):
            store.put(canonical(f"{number:064x}"))
        gone = {store.put(canonical()), store.put(patch(antecedents=("x",)))}
        gone.add(store.put(patch("d" * 64, antecedents=("x", CHUNK))))
        files: Any = store._disk._files  # type: ignore[union-attr]
        peek, opened = files.peek, []
        monkeypatch.setattr(files, "peek", lambda key: opened.append(key) or peek(key))
        done = StoreAdmin(store).forget(CHUNK)
        assert (set(done.removed), done.left) == (gone, ())
        assert set(opened) <= gone
        assert len(store.ls()) == 30


def test_a_directory_keeps_its_rows_in_one_file(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
        StoreAdmin(store).pin([key])
        store.ls()
    assert {path.name for path in root.rglob("*.sqlite")} == {"index.sqlite"}
    assert (root / "keep.json").stat().st_mode & 0o777 == 0o600

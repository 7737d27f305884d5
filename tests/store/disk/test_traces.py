from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore, StoreAdmin
from kamera.store.disk.folder import Folder
from kamera.store.disk.tier import DiskTier
from kamera.store.disk.traces import Trace
from lab.reliability import rig
from tests.killing import in_child
from tests.store.builders import CHUNK, CONTEXT, assert_same, canonical, file_of, flip, patch

KEY = canonical().key
KEYS = [f"{number:064x}" for number in range(3)]
LONG_AGO = time.time() - 4000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def tmp(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "tmp").iterdir())


def begin_writing(root: Path, *keys: str) -> Trace:
    return Trace.begin(Folder.at(root / "tmp"), keys)


def counted_moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that files were moved to from now on."""
    moves: list[str] = []
    real = os.replace

    def replace(source: Any, target: Any, **named: Any) -> None:
        moves.append(target)
        real(source, target, **named)

    monkeypatch.setattr(os, "replace", replace)
    return moves


def test_a_trace_names_its_objects_until_it_is_settled(root: Path) -> None:
    with ChunkStore.open(root) as store:
        files: Any = store._disk._files  # type: ignore[union-attr]
        one, other = begin_writing(root, *KEYS[:2]), begin_writing(root, KEYS[2])
        assert files.names_in_traces() == set(KEYS)
        one.settle()
        one.close()
        other.close()
        assert files.names_in_traces() == {KEYS[2]} and len(tmp(root)) == 1
        store.put(canonical())  # the next writer clears up
        assert files.names_in_traces() == set() and tmp(root) == []


def test_only_a_dead_writers_trace_is_left_to_others(root: Path) -> None:
    ChunkStore.open(root).close()
    folder = Folder.at(root / "tmp")

    def dies(tell: Callable[[bytes], None]) -> None:
        mine = begin_writing(root, *KEYS)
        folder.create(mine.part(KEYS[0]), b"half")
        [file] = (name for name in tmp(root) if name.endswith(".lock"))
        tell(str(Trace.take_over(folder, file)).encode())
        rig.die()

    assert in_child(dies).told == b"None"
    assert len(tmp(root)) == 2
    [file] = (name for name in tmp(root) if name.endswith(".lock"))
    left = Trace.take_over(folder, file)
    assert left is not None and list(left.names) == KEYS and left.part(KEYS[0]) in tmp(root)
    assert Trace.take_over(folder, file) is None
    left.close()
    assert Trace.take_over(folder, "no.lock") is None


def test_what_dead_writers_left_goes_when_the_store_is_opened(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
    (root / "tmp" / f"{KEY}.0a.part").write_bytes(b"half")
    (root / "tmp" / "0a.lock").write_text(KEY)
    with ChunkStore.open(root) as store:
        assert tmp(root) == []
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_what_a_live_writer_is_at_stays(root: Path) -> None:
    ChunkStore.open(root).close()
    writer = begin_writing(root, KEY)
    part = root / "tmp" / writer.part(KEY)
    part.write_bytes(b"half")
    os.utime(part, (LONG_AGO, LONG_AGO))
    with ChunkStore.open(root) as store:
        assert StoreAdmin(store).verify().stale == 0
        assert len(tmp(root)) == 2 and part.name in tmp(root)
        writer.close()
        assert StoreAdmin(store).verify().stale == 2
        assert tmp(root) == []


def test_files_without_a_writer_are_removed_after_an_hour(root: Path) -> None:
    with ChunkStore.open(root) as store:
        young, old = root / "tmp" / f"{KEY}.77.aa", root / "tmp" / f"{KEY}.78.bb"
        for path in (young, old):
            path.write_bytes(b"half")
        os.utime(old, (LONG_AGO, LONG_AGO))
        assert StoreAdmin(store).verify().stale == 1
        assert tmp(root) == [young.name]


def test_a_deletion_interrupted_after_the_file_is_complete(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
    file_of(root, KEY).unlink()
    with ChunkStore.open(root) as store:
        assert store.ls() == [] and tmp(root) == []


def test_an_interrupted_write_gets_its_row_on_opening(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        store.put(patch(rank=2))
        monkeypatch.setattr(store._disk.index, "put", lambda *_: None)  # type: ignore[union-attr]
        store.put(patch(rank=5))
        monkeypatch.undo()
    (root / "tmp" / "0a.lock").write_text(patch().key)
    with ChunkStore.open(root) as store:
        assert [row.rank for row in store.ls()] == [5]


def test_verify_counts_what_index_and_files_did_not_agree_on(root: Path) -> None:
    with ChunkStore.open(root) as store:
        unlisted, lost = store.put(canonical()), store.put(patch())
        store._disk.index.drop(unlisted)  # type: ignore[union-attr]
        file_of(root, lost).unlink()
        report = StoreAdmin(store).verify()
        assert (report.ok, report.orphan_files, report.orphan_rows) == (1, 1, 1)
        assert [row.key for row in store.ls()] == [unlisted]
        again = StoreAdmin(store).verify()
        assert (again.ok, again.orphan_files, again.orphan_rows) == (1, 0, 0)


def test_verify_makes_the_rows_anew(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(patch(rank=3))
        [row] = store.ls()
        index = store._disk.index  # type: ignore[union-attr]
        known = index.get(row.key)
        assert known is not None
        index.put([(dataclasses.replace(known[0], rank=9), known[1])])  # a lie about an unchanged file
        assert [r.rank for r in store.ls()] == [9]
        report = StoreAdmin(store).verify()
        assert [r.rank for r in store.ls()] == [3] and report.ok == 1


def test_of_many_that_put_one_chunk_at_once_one_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        moves = counted_moves(monkeypatch)
        together = threading.Barrier(8)

        def puts(seed: int) -> str:
            together.wait()
            return store.put(canonical(seed=seed))

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(puts, range(8))) == {KEY}
        assert moves == [f"{KEY}.safetensors"]
        found = store.get_canonical(CONTEXT, CHUNK)
    with ChunkStore.open(root) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), found)


def overtake(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Have ``other`` done after the next write aside, before its file gets its name."""
    real = DiskTier._bring

    def bring(self: DiskTier, *arguments: Any) -> bool:
        monkeypatch.undo()
        other()
        return real(self, *arguments)

    monkeypatch.setattr(DiskTier, "_bring", bring)


def test_who_comes_second_to_a_canonical_takes_the_other_writers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as one, ChunkStore.open(root) as two:
        overtake(monkeypatch, lambda: one.put(canonical(seed=1)))
        two.put(canonical(seed=2))
        assert_same(two.get_canonical(CONTEXT, CHUNK), canonical(seed=1))
        assert [row.key for row in one.ls()] == [row.key for row in two.ls()] == [KEY] and tmp(root) == []


def test_who_comes_second_to_a_patch_replaces_it_unless_it_stands_on_stronger_kv(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as one, ChunkStore.open(root, memory_limit=0) as two:
        for mine, expected in ((patch(rank=3, formed="near"), 2), (patch(rank=5), 5)):
            overtake(monkeypatch, lambda: one.put(patch(rank=2)))
            two.put(mine)
            found = two.get_patch(CONTEXT, CHUNK, ("x", "y"))
            assert found is not None and found.patch.rank == expected
            assert [row.rank for row in one.ls()] == [row.rank for row in two.ls()] == [expected]


def test_what_was_deleted_meanwhile_is_put(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root, memory_limit=0) as one, ChunkStore.open(root, memory_limit=0) as two:
        one.put(patch(rank=2))
        overtake(monkeypatch, lambda: StoreAdmin(one).delete(patch().key))
        two.put(patch(rank=3))
        assert two.get_patch(CONTEXT, CHUNK, ("x", "y")) is not None
        assert [row.rank for row in two.ls()] == [3]


DAMAGE = {
    "flipped tensor": lambda path: flip(path),
    "flipped header": lambda path: flip(path, 300),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:500]),
    "emptied": lambda path: path.write_bytes(b""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_put_over_a_damaged_canonical_heals_it(root: Path, damage: Any) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        damage(file_of(root, KEY))
        store.put(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        assert [copy.name for copy in StoreAdmin(store).quarantine.copies()] == [KEY]
        assert [row.key for row in store.ls()] == [KEY]


def test_damage_that_left_no_trace_is_found_by_reading_alone(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(canonical())
        path = file_of(root, KEY)
        before = path.stat()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        store.put(canonical())
        assert StoreAdmin(store).quarantine.copies() == []
        assert len(StoreAdmin(store).verify().quarantined) == 1
        store.put(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_an_intact_canonical_without_a_row_is_not_rewritten(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical(seed=1))
        store._disk.index.drop(KEY)  # type: ignore[union-attr]
        moves = counted_moves(monkeypatch)
        store.put(canonical(seed=2))
        assert moves == [] and [row.key for row in store.ls()] == [KEY]
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical(seed=1))

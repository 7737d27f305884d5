from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import StoreError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.disk import claims as claims_module
from kamera.store.disk import tier as disk_module
from kamera.store.disk.claims import Claim, Claims, claim
from kamera.store.disk.folder import Folder
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


def held(root: Path, key: str = KEY) -> Claim:
    taken = claim(Folder.at(root / "tmp"), key, 0)
    assert taken is not None
    return taken


def counted_moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that files were moved to from now on."""
    moves: list[str] = []
    real = os.replace

    def replace(source: Any, target: Any, **named: Any) -> None:
        moves.append(target)
        real(source, target, **named)

    monkeypatch.setattr(os, "replace", replace)
    return moves


def test_a_claim_excludes_everyone_until_it_is_let_go(root: Path) -> None:
    ChunkStore.open(root).close()
    folder = Folder.at(root / "tmp")
    first = claim(folder, KEY, 0)
    assert first is not None and not first.interrupted
    assert claim(folder, KEY, 0.02) is None
    other = claim(folder, "0" * 64, 0)
    assert other is not None
    first.settle()
    first.close()
    second = claim(folder, KEY, 0)
    assert second is not None and not second.interrupted


def test_a_killed_holder_loses_its_claim_and_is_noticed(root: Path) -> None:
    ChunkStore.open(root).close()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        taken = claim(Folder.at(root / "tmp"), KEY, 0)
        os.write(writer, b"1" if taken else b"0")
        signal.pause()
        os._exit(0)
    assert os.read(reader, 1) == b"1"
    folder = Folder.at(root / "tmp")
    assert claim(folder, KEY, 0) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mine = claim(folder, KEY, 5)
    assert mine is not None and mine.interrupted


def test_a_dead_writers_claim_of_several_objects_goes_to_the_next_one(root: Path) -> None:
    ChunkStore.open(root).close()

    def dies(tell: Callable[[bytes], None]) -> None:
        claims = Claims(Folder.at(root / "tmp"))
        assert all(claims.take(key, 0) for key in KEYS)
        assert not any(claims.interrupted.values())
        tell(str(len({os.stat(root / "tmp" / f"{key}.lock").st_ino for key in KEYS})).encode())
        rig.die()

    assert in_child(dies).told == b"1", "one lock with three names"
    folder = Folder.at(root / "tmp")
    mine = Claims(folder)
    assert all(mine.take(key, 0) for key in KEYS) and all(mine.interrupted.values())
    assert claim(folder, KEYS[1], 0) is None
    for key in KEYS:
        mine.settle(key)
    mine.close()
    assert tmp(root) == []


def test_a_claim_is_let_go_with_the_batch_and_not_before(root: Path) -> None:
    ChunkStore.open(root).close()
    folder = Folder.at(root / "tmp")
    other = claim(folder, KEYS[1], 0)
    assert other is not None
    mine = Claims(folder)
    assert mine.take(KEYS[0], 0) and not mine.take(KEYS[1], 0) and mine.take(KEYS[2], 0)
    assert [claim(folder, key, 0) for key in KEYS] == [None] * 3
    other.settle()
    other.close()
    assert mine.take(KEYS[1], 0)
    mine.settle(KEYS[0])
    mine.settle(KEYS[1])
    mine.close()
    left = claim(folder, KEYS[2], 0)
    assert left is not None and left.interrupted, "it was not settled"


def test_what_dead_writers_left_goes_when_the_store_is_opened(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
    (root / "tmp" / f"{KEY}.part").write_bytes(b"half")
    (root / "tmp" / f"{KEY}.lock").touch()
    with ChunkStore.open(root) as store:
        assert tmp(root) == []
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_what_a_live_writer_is_at_stays(root: Path) -> None:
    ChunkStore.open(root).close()
    writer = held(root)
    (root / "tmp" / f"{KEY}.part").write_bytes(b"half")
    os.utime(root / "tmp" / f"{KEY}.part", (LONG_AGO, LONG_AGO))
    with ChunkStore.open(root) as store:
        assert StoreAdmin(store).verify().stale == 0
        assert tmp(root) == [f"{KEY}.lock", f"{KEY}.part"]
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
    (root / "tmp" / f"{patch().key}.lock").touch()
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


def test_verify_can_make_the_rows_anew(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(patch(rank=3))
        [row] = store.ls()
        index = store._disk.index  # type: ignore[union-attr]
        known = index.get(row.key)
        assert known is not None
        index.put([(dataclasses.replace(known[0], rank=9), known[1])])  # a lie about an unchanged file
        assert [r.rank for r in store.ls()] == [9]
        report = StoreAdmin(store).verify(rebuild=True)
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


def test_a_waiting_writer_takes_the_other_writers_object(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root), ChunkStore.open(root) as two:
        writer = held(root)
        asked, claims = threading.Event(), claims_module.claim

        def told(*arguments: Any) -> Claim | None:
            asked.set()
            return claims(*arguments)

        monkeypatch.setattr(claims_module, "claim", told)
        late = threading.Thread(target=lambda: two.put(canonical(seed=2)))
        late.start()
        assert asked.wait(300) and not file_of(root, KEY).exists()
        # what the claim's holder does inside
        with ChunkStore.open(root.parent / "other") as other:
            other.put(canonical(seed=1))
        os.replace(file_of(root.parent / "other", KEY), file_of(root, KEY))
        writer.settle()
        writer.close()
        late.join(300)
        assert_same(two.get_canonical(CONTEXT, CHUNK), canonical(seed=1))


def test_a_claim_never_released_is_an_error_not_a_deadlock(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_CLAIM_SECONDS", 0.05)
    with ChunkStore.open(root) as store:
        writer = held(root)
        with pytest.raises(StoreError, match=KEY):
            store.put(canonical())
        store.put(patch())  # another object is another claim
        writer.close()
        store.put(canonical())
        assert store.has(CONTEXT, CHUNK) and tmp(root) == []


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

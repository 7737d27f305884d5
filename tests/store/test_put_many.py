"""Records put together: written together, and each of them whole, whatever happens to the others."""

from __future__ import annotations

import fcntl
import os
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import rig
from kamera.errors import StoreError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.records import Record
from tests.killing import Countdown, in_child
from tests.store.builders import CONTEXT, VISION, canonical, encoding, file_of, patch

CHUNKS = [f"{number:064x}" for number in range(20)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def accepted(store: ChunkStore, records: Sequence[Record]) -> list[str]:
    puts = store.put_many(records)
    assert [put.error for put in puts] == [None] * len(records)
    return [put.key for put in puts]


def left_behind(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "tmp").iterdir())


def mixed() -> list[Record]:
    """Patches, canonicals and their encodings, in an order in which they must not appear."""
    chunks = CHUNKS[:5]
    made: list[Record] = [patch(chunk) for chunk in chunks]
    made += [canonical(chunk, vision=VISION) for chunk in chunks]
    return made + [encoding(chunk) for chunk in chunks]


def test_the_bytes_are_on_the_disk_before_the_names_are_and_these_before_the_rows(root: Path) -> None:
    events: list[str] = []

    def spy(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            events.append(name)
            return call(*arguments, **named)

        return made

    with ChunkStore.open(root) as store:
        rig.listen(store, lambda word, call: (events.append(word), call())[1])
        for records in ([canonical(CHUNKS[0])], [canonical(chunk) for chunk in CHUNKS[1:4]]):
            events.clear()
            with rig.around(("fsync", "replace"), spy):
                accepted(store, records)
            count = len(records)
            assert events[: 2 * count + 1] == [*["fsync"] * count, *["replace"] * count, "fsync"]
            assert [word for word in events[2 * count + 1 :] if word != "SELECT"] == [
                "BEGIN",
                "INSERT",
                "COMMIT",
            ]


@pytest.mark.parametrize("at", ["files", "names"])
def test_a_disk_that_does_not_sync_acknowledges_nothing(root: Path, at: str) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        accepted(store, [patch(chunk, rank=2) for chunk in CHUNKS[:3]])

        def broken(_: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def made(descriptor: int) -> None:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                if is_file == (at == "files"):
                    raise OSError(5, "Input/output error")
                call(descriptor)

            return made

        with rig.around(("fsync",), broken):
            puts = store.put_many([patch(chunk, rank=7) for chunk in CHUNKS[:3]])
        assert all(isinstance(put.error, StoreError) for put in puts)
        held = {store.get_patch(CONTEXT, chunk, ("x", "y")).patch.rank for chunk in CHUNKS[:3]}  # type: ignore
        assert held == ({2} if at == "files" else {7}), "old or new, and of one kind"
        assert {row.rank for row in store.ls()} == held
        accepted(store, [patch(chunk, rank=9) for chunk in CHUNKS[:3]])
        assert left_behind(root) == []


def test_a_writer_killed_in_a_batch_leaves_whole_objects_and_a_beginning_of_it(tmp_path: Path) -> None:
    """At each of its calls: old or new objects, encodings first, rows that agree, and nothing else."""
    records = [*mixed(), *(patch(chunk, antecedents=("old",), rank=7) for chunk in CHUNKS[:3])]
    placed = [r.key for kind in ("encoding", "canonical", "exact") for r in records if r.kind == kind]
    olds = [patch(chunk, antecedents=("old",)).key for chunk in CHUNKS[:3]]

    def fresh(root: Path) -> None:
        with ChunkStore.open(root) as store:
            accepted(store, [patch(chunk, antecedents=("old",), rank=2) for chunk in CHUNKS[:3]])

    def work(root: Path, countdown: Countdown) -> None:
        with (
            ChunkStore.open(root, memory_limit=0) as store,
            countdown.over(os, "open", "write", "fsync", "link", "replace", "unlink", "mkdir", "rmdir"),
            countdown.over(fcntl, "flock"),
        ):
            accepted(store, records)

    counted = Countdown()
    fresh(tmp_path / "counted")
    work(tmp_path / "counted", counted)
    draw = random.Random(0)
    points = [*sorted(draw.sample(range(1, counted.calls), 16)), counted.calls]
    prefixes: set[int] = set()
    for n in points:
        root = tmp_path / str(n)
        fresh(root)
        ended = in_child(lambda _, root=root, n=n: work(root, Countdown(n)))
        assert ended.killed, f"{n} of {counted.calls}"
        with ChunkStore.open(root, memory_limit=0) as store:
            assert left_behind(root) == []
            rows = {row.key: row for row in store.ls()}
            new = [key for key in placed if file_of(root, key).exists()]
            for chunk, key in zip(CHUNKS[:3], olds, strict=True):
                found = store.get_patch(CONTEXT, chunk, ("old",))
                assert found is not None and found.patch.rank == rows[key].rank
                if found.patch.rank == 2:
                    new.remove(key)
            assert new == placed[: len(new)], "what is there is a beginning of the batch"
            prefixes.add(len(new))
            report = StoreAdmin(store).verify()
            assert (
                report.ok
                == len(rows)
                == len({*new, *(patch(c, antecedents=("old",)).key for c in CHUNKS[:3])})
            )
            assert (report.quarantined, report.orphan_files, report.orphan_rows) == ((), 0, 0)
            accepted(store, records)
            assert len(store.ls()) == len(records)
    assert {0, len(placed)} < prefixes, "killed before the names, behind them and in between"

"""Uses of objects: counted, fading, and written down at intervals."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from kamera.store import ChunkStore
from kamera.store.disk.index import Index
from kamera.store.disk.notes import HALF_LIFE, decay
from tests.store.builders import CONTEXT, canonical, patch, rows_of
from tests.store.disk.test_index import CHUNK, CLOCK, ROWS, Clock, Rows, filled


def uses(index: Index) -> dict[str, tuple[float, float | None]]:
    return {w.key: (w.uses, w.used) for w in index.weigh("")}


def test_uses_are_counted_and_fade(tmp_path: Path) -> None:
    clock = Clock()
    index = filled(tmp_path / "i", ROWS[:3], clock)
    rows_of(index, tenant="")
    for _ in range(3):
        index.notes.count_use(ROWS[1].key)
    index.notes.count_use("f" * 64)  # of nothing here
    assert uses(index) == {ROWS[0].key: (0, None), ROWS[1].key: (3, 1e9), ROWS[2].key: (0, None)}
    clock.now += HALF_LIFE
    index.notes.count_use(ROWS[1].key)
    assert uses(index)[ROWS[1].key] == (2.5, clock.now)
    assert decay(2.5, clock.now, clock.now + 2 * HALF_LIFE) == 0.625
    assert decay(2.5, clock.now, clock.now - 5) == 2.5  # a clock that was set back


def test_reads_write_no_row_each(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        store.put(canonical())
        for i in range(40):
            store.put(patch(antecedents=(str(i),)))
        log = tmp_path / "store" / "index.sqlite-wal"
        before = log.stat().st_size
        for _ in range(5):
            assert store.get_canonical(CONTEXT, CHUNK) is not None
            for i in range(40):
                assert store.get_patch(CONTEXT, CHUNK, (str(i),)) is not None
        assert log.stat().st_size == before
    with ChunkStore.open(tmp_path / "store") as store:
        counted = [w.uses for w in store._disk.index.weigh("")]  # type: ignore[union-attr]
    assert len(counted) == 41 and all(abs(count - 5) < 1e-3 for count in counted)


def test_uses_survive_a_rebuild_and_go_with_their_object(tmp_path: Path) -> None:
    files = Rows(ROWS[:3])
    index = Index(tmp_path / "i", files, clock=CLOCK)
    assert len(rows_of(index, tenant="")) == 3
    for row in ROWS[:3]:
        index.notes.count_use(row.key)
    index.notes.flush()
    index.drop(ROWS[0].key)
    index.put([(dataclasses.replace(ROWS[1], bytes=7), "newer")])
    files.take(ROWS[2].key)
    assert index.correct_all_rows(afresh=True) == 2
    assert {key: count for key, (count, _) in uses(index).items()} == {ROWS[0].key: 0, ROWS[1].key: 1}


def test_a_reader_does_not_wait_for_a_writer_to_count_a_use(tmp_path: Path) -> None:
    mine, other = filled(tmp_path / "i", ROWS[:3]), filled(tmp_path / "i", ROWS[:3])
    assert uses(mine)[ROWS[0].key] == (0, None)
    with other._db.writing():
        mine.notes.count_use(ROWS[0].key)
        flushing = threading.Thread(target=mine.notes.flush)
        flushing.start()
        flushing.join(120)
        assert not flushing.is_alive()
    assert uses(mine)[ROWS[0].key] == (0, None)
    mine.notes.count_use(ROWS[0].key)
    assert uses(mine)[ROWS[0].key][0] == 1

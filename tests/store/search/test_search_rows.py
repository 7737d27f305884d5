"""Search over rows that are damaged, stale, lost, or written by another process."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.store import ChunkStore, StoreAdmin
from kamera.store.search.vectors import Fresh
from tests.store.builders import CONTEXT
from tests.store.search.test_search import WIDTH, assert_as_reference, filled, folder, picture, put, rows_file

# -- rows that are damaged, stale, or another's ----------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("search") / "store"
    return root, filled(root)


@settings(max_examples=30)
@given(data=st.data())
def test_search_equals_a_scan_after_any_flipped_byte(stored, data):
    root, records = stored
    whole = bytearray(rows_file(root).read_bytes())
    used = [i for i, byte in enumerate(whole) if byte]  # most of the file is empty pages
    at = data.draw(st.sampled_from(used))
    whole[at] ^= data.draw(st.integers(1, 255))
    with folder() as copy:
        shutil.copytree(root, copy)
        rows_file(copy).write_bytes(whole)
        with ChunkStore.open(copy) as store:
            assert_as_reference(store, records)
            put(store, picture(50))
            assert_as_reference(store, [*records, picture(50)])


@pytest.mark.parametrize("size", [0, 1, 99, 4096, 6000, -4096])
def test_a_truncated_rows_file_is_made_anew_and_said_so(stored, size, caplog):
    root, records = stored
    with folder() as copy, caplog.at_level(logging.WARNING):
        shutil.copytree(root, copy)
        rows_file(copy).write_bytes(rows_file(root).read_bytes()[:size])
        with ChunkStore.open(copy) as store:
            assert_as_reference(store, records)
    assert "made anew" in caplog.text or "starting over" in caplog.text


def test_a_stale_rows_file_is_brought_up_to_date(tmp_path):
    records = filled(tmp_path)
    old = rows_file(tmp_path).read_bytes()
    with ChunkStore.open(tmp_path) as store:
        StoreAdmin(store).delete(records[0].key)
        put(store, picture(20))
    rows_file(tmp_path).write_bytes(old)
    with ChunkStore.open(tmp_path) as store:
        assert_as_reference(store, [*records[1:], picture(20)])


def test_rows_lost_under_two_open_stores_are_rebuilt_by_both(tmp_path):
    records = filled(tmp_path)
    with ChunkStore.open(tmp_path) as one, ChunkStore.open(tmp_path) as other:
        assert_as_reference(one, records)
        assert_as_reference(other, records)
        for file in (tmp_path / "search").iterdir():
            file.unlink()
        put(other, picture(30))
        assert_as_reference(one, [*records, picture(30)])
        assert_as_reference(other, [*records, picture(30)])


def test_verify_mends_the_rows_and_says_so(tmp_path):
    records = filled(tmp_path)
    with ChunkStore.open(tmp_path) as store:
        assert StoreAdmin(store).verify().embeddings == ()
        vectors = store._search._vectors
        vectors.drop([records[0].key])
        vectors.put([Fresh("elsewhere", "no name", "x", None)])
        told = StoreAdmin(store).verify().embeddings
        assert len(told) == 1 and "1 made anew" in told[0]
        assert StoreAdmin(store).verify().embeddings == ()
        assert_as_reference(store, records)
    rows_file(tmp_path).write_bytes(b"SQLite format 3\0" + bytes(5000))
    with ChunkStore.open(tmp_path) as store:
        assert "6 made anew" in StoreAdmin(store).verify().embeddings[0]
        assert_as_reference(store, records)


# -- other processes -------------------------------------------------------------------------------


def obey(root: Path, orders: Any) -> None:
    """Another process: does what it is told to its own store."""
    with ChunkStore.open(root) as store:
        while line := orders.recv():
            verb, *seeds = line.split()
            for seed in map(int, seeds):
                if verb == "put":
                    put(store, picture(seed))
                elif verb == "delete":
                    StoreAdmin(store).delete(picture(seed).key)
            if verb == "search":
                assert_as_reference(store, [picture(int(seed)) for seed in seeds])
            orders.send("done")


def test_two_processes_see_each_others_puts_and_deletes_at_once(tmp_path):
    fork = multiprocessing.get_context("fork")  # another interpreter imports torch once more, for seconds
    orders, theirs = fork.Pipe()
    other = fork.Process(target=obey, args=(tmp_path, theirs))
    other.start()
    theirs.close()

    def there(line: str) -> None:
        orders.send(line)
        assert orders.recv() == "done", line

    with ChunkStore.open(tmp_path) as here:
        for seed in range(4):
            put(here, picture(seed))
        assert_as_reference(here, [picture(seed) for seed in range(4)])
        there("search 0 1 2 3")
        there("put 4 5 6")
        there("delete 0 5")
        assert_as_reference(here, [picture(seed) for seed in (1, 2, 3, 4, 6)])
        StoreAdmin(here).delete(picture(4).key)
        put(here, picture(7))
        there("search 1 2 3 6 7")
        there("delete 1 2 3 6 7")
        assert here.search(np.ones(WIDTH), context=CONTEXT) == []
    orders.send("")
    other.join()
    assert other.exitcode == 0

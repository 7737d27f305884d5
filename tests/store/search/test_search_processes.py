"""Search over objects that another process puts and deletes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CONTEXT
from tests.store.search.test_search import WIDTH, assert_as_reference, picture, put


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

"""The queue of background work: bounded in bytes, dropped by priority, never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kamera.content import Encoded
from kamera.errors import StoreError
from kamera.patches import Background, Losses, Owed, Priority, Strict
from kamera.patches.background import waiting_records
from kamera.store import ChunkStore, Put
from tests.store.builders import canonical

LONG = 300


class Gate:
    """Work in progress until it opens: all else waits behind it."""

    def __init__(self, queue: Background) -> None:
        self._opened, self._begun = threading.Event(), threading.Event()
        queue.add(self._wait)
        assert self._begun.wait(LONG)

    def _wait(self) -> None:
        self._begun.set()
        assert self._opened.wait(LONG), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def queue() -> Background:
    return Background(limit=1000)


@pytest.fixture
def gate(queue) -> Iterator[Gate]:
    made = Gate(queue)
    yield made
    made.open()
    queue.flush()


def size(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=torch.uint8)]


def test_what_is_worth_least_is_dropped_first_and_of_equals_the_oldest(queue, gate):
    done: list[str] = []
    told: list[str] = []
    given = [
        ("chunk", Priority.CHUNK),
        ("old audit", Priority.AUDIT),
        ("patch", Priority.PATCH),
        ("new audit", Priority.AUDIT),
    ]
    for name, worth in given:
        queue.add(
            lambda name=name: done.append(name), worth, size(250), lambda _, name=name: told.append(name)
        )
    assert (queue.held_bytes, told) == (1000, [])
    for name in ("second", "third"):
        queue.add(lambda name=name: done.append(name), Priority.CHUNK, size(250))
        assert queue.held_bytes == 1000
    assert told == ["old audit", "new audit"]
    queue.add(lambda: done.append("fourth"), Priority.CHUNK, size(300))
    assert told[2:] == ["patch", "chunk"], "a chunk only when nothing else is left"
    assert queue.held_bytes <= 1000
    assert queue.dropped == 4
    gate.open()
    queue.flush()
    assert done == ["second", "third", "fourth"]
    assert queue.held_bytes == 0


def test_memory_that_several_pieces_share_counts_once(queue, gate):
    shared = torch.zeros(900, dtype=torch.uint8)
    for start in range(5):
        queue.add(lambda: None, Priority.AUDIT, [shared[start:], shared])
    assert (queue.held_bytes, queue.dropped) == (900, 0)


def test_what_a_call_needs_goes_first(queue, gate):
    done: list[str] = []
    for name in ("other", "needed", "needed", "last"):
        queue.add(lambda name=name: done.append(name), name=name)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(queue.flush_named, "needed")
        while queue._waiting[0].name != "needed":
            time.sleep(0.001)
        gate.open()
        settled.result(LONG)
    assert done[:2] == ["needed", "needed"] and not queue.busy("needed")
    queue.flush()
    assert done == ["needed", "needed", "other", "last"]


def test_an_error_ends_its_own_piece_alone(queue, caplog):
    done: list[str] = []

    def broken() -> None:
        raise ValueError("says the test")

    queue.add(broken, holds=size(10))
    queue.add(lambda: True, holds=size(10))  # neither owed nor ready
    queue.add(lambda: done.append("next"))
    queue.flush()
    assert done == ["next"] and "must be an iterable, not bool" in caplog.text
    assert "background work failed: says the test" in caplog.text
    assert queue.held_bytes == 0


def test_a_flush_waits_for_what_work_hands_over(queue):
    done: list[str] = []
    queue.add(lambda: queue.add(lambda: done.append("handed over")) and None)
    queue.flush()
    assert done == ["handed over"]


# -- what pieces owe a store -----------------------------------------------------------------------


class Books(ChunkStore):
    """A store that notes what is put together; ``refused`` is the chunk whose records it does not take."""

    refused = ""

    def put_many(self, records):
        self.__dict__.setdefault("batches", []).append([record.chunk_id for record in records])
        full = StoreError("no room, says the test")
        puts = super().put_many(records)
        return [
            Put(put.key, full if record.chunk_id == self.refused else put.error)
            for put, record in zip(puts, records, strict=True)
        ]


@pytest.fixture
def store() -> Iterator[Books]:
    with Books.open("memory://") as opened:
        yield opened


def owed(store: ChunkStore, chunk: str, losses: Losses | None = None) -> list[Owed]:
    """Of a chunk that waits for the store until it is put."""
    return [Owed(store, [canonical(chunk)], losses or Strict(), f"{chunk} was not kept")]


def awaited(store: ChunkStore, *chunks: str) -> dict[object, Encoded]:
    waiting = waiting_records(store).chunks
    for chunk in chunks:
        waiting[canonical(chunk).context, chunk] = Encoded(torch.tensor([1]), chunk_id=chunk)
    return waiting


def test_what_pieces_owe_is_put_together_when_no_piece_is_left(queue, gate, store):
    waiting = awaited(store, *"abc")
    for name in "abc":
        queue.add(lambda name=name: owed(store, name), reads=())
    queue.add(lambda: None, reads=())
    gate.open()
    queue.flush()
    assert store.batches == [["a", "b", "c"]]
    assert waiting == {}
    assert {info.chunk_id for info in store.ls()} == set("abc")
    assert queue.held_bytes == 0


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_a_refused_record_is_a_loss_of_its_own_piece(queue, gate, store, caplog):
    losses, waiting = {name: Losses() for name in "abcd"}, awaited(store, *"abcd")
    store.refused = "b"
    for name in "abc":
        queue.add(lambda name=name: owed(store, name, losses[name]), reads=())
    queue.add(lambda: owed(store, "b"), reads=())
    queue.add(lambda: owed(store, "d", losses["d"]), reads=())
    gate.open()
    queue.flush()
    assert len(store.batches) == 1 and waiting == {}
    assert {name: one.unkept for name, one in losses.items() if one.unkept} == {"b": {"b"}}
    notes: list[str] = []
    for one in losses.values():
        with one.note_in(notes):
            pass
    assert notes == ["b was not kept: no room, says the test"]
    assert "background work failed: no room, says the test" in caplog.text


def test_a_store_that_fails_as_a_whole_leaves_nobody_waiting(queue, gate, store, monkeypatch):
    waiting, losses = awaited(store, *"ab"), Losses()

    def broken(records):
        raise RuntimeError("says the test")

    monkeypatch.setattr(store, "put_many", broken)
    for name in "ab":
        queue.add(lambda name=name: owed(store, name, losses), reads=())
    gate.open()
    queue.flush()
    assert waiting == {} and losses.unkept == {"a", "b"}

"""The queue of later work: bounded in bytes, dropped by worth, never waited for by those who hand it over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kamera.patches import Later, Worth

LONG = 300


class Gate:
    """Work in progress until it opens: all else waits behind it."""

    def __init__(self, queue: Later) -> None:
        self._opened, self._begun = threading.Event(), threading.Event()
        queue.add(self._wait)
        assert self._begun.wait(LONG)

    def _wait(self) -> None:
        self._begun.set()
        assert self._opened.wait(LONG), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def queue() -> Later:
    return Later(limit=1000)


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
        ("chunk", Worth.CHUNK),
        ("old audit", Worth.AUDIT),
        ("patch", Worth.PATCH),
        ("new audit", Worth.AUDIT),
    ]
    for name, worth in given:
        queue.add(
            lambda name=name: done.append(name), worth, size(250), lambda _, name=name: told.append(name)
        )
    assert (queue.held, told) == (1000, [])
    for name in ("second", "third"):
        queue.add(lambda name=name: done.append(name), Worth.CHUNK, size(250))
        assert queue.held == 1000
    assert told == ["old audit", "new audit"]
    queue.add(lambda: done.append("fourth"), Worth.CHUNK, size(300))
    assert told[2:] == ["patch", "chunk"], "a chunk only when nothing else is left"
    assert queue.held <= 1000
    assert queue.dropped == 4
    gate.open()
    queue.flush()
    assert done == ["second", "third", "fourth"]
    assert queue.held == 0


def test_whoever_is_dropped_is_told_why(queue, gate):
    told: list[str] = []
    queue.add(lambda: None, Worth.AUDIT, size(600), told.append)
    queue.add(lambda: None, Worth.PATCH, size(600))
    assert told == ["later work held more than its 1000 bytes"]


def test_the_newest_piece_is_dropped_where_it_is_worth_least(queue, gate):
    told: list[str] = []
    queue.add(lambda: None, Worth.CHUNK, size(900))
    queue.add(lambda: None, Worth.GUESS, size(200), told.append)
    assert len(told) == 1
    assert queue.held == 900


def test_a_piece_larger_than_the_limit_is_done_if_nothing_is_worth_more(queue, gate):
    done: list[str] = []
    queue.add(lambda: done.append("small"), Worth.PATCH, size(10))
    queue.add(lambda: done.append("large"), Worth.CHUNK, size(5000))
    assert queue.dropped == 1
    gate.open()
    queue.flush()
    assert done == ["large"]


def test_memory_that_several_pieces_share_counts_once(queue, gate):
    shared = torch.zeros(900, dtype=torch.uint8)
    for start in range(5):
        queue.add(lambda: None, Worth.AUDIT, [shared[start:], shared])
    assert (queue.held, queue.dropped) == (900, 0)


def test_what_was_made_ready_counts_until_it_is_let_go(queue, gate):
    told: list[str] = []
    kept = queue.keep(Worth.GUESS, 700, told.append)
    assert queue.held == 700
    queue.cancel(kept)
    queue.cancel(kept)
    assert (queue.held, told) == (0, [])
    queue.keep(Worth.GUESS, 700, told.append)
    queue.add(lambda: None, Worth.AUDIT, size(400))
    assert (queue.held, len(told)) == (400, 1)


def test_waiting_for_the_queue_does_not_wait_for_what_is_ready(queue):
    queue.keep(Worth.GUESS, 10, lambda _: None)
    queue.flush()


def test_work_that_nobody_wants_any_more_is_not_done(queue, gate):
    done: list[str] = []
    piece = queue.add(lambda: done.append("cancelled"), Worth.CHUNK, size(100))
    queue.add(lambda: done.append("wanted"))
    queue.cancel(piece)
    assert queue.held == 0
    gate.open()
    queue.flush()
    assert done == ["wanted"]
    assert queue.dropped == 0


def test_what_a_call_needs_goes_first(queue, gate):
    done: list[str] = []
    for name in ("other", "needed", "needed", "last"):
        queue.add(lambda name=name: done.append(name), name=name)
    queue.hasten("needed")
    gate.open()
    queue.flush()
    assert done == ["needed", "needed", "other", "last"]


def test_an_error_ends_its_own_piece_alone(queue, caplog):
    done: list[str] = []

    def broken() -> None:
        raise ValueError("says the test")

    queue.add(broken, holds=size(10))
    queue.add(lambda: done.append("next"))
    queue.flush()
    assert done == ["next"]
    assert "later work failed: says the test" in caplog.text
    assert queue.held == 0


def test_a_flush_waits_for_what_work_hands_over(queue):
    done: list[str] = []
    queue.add(lambda: queue.add(lambda: done.append("handed over")) and None)
    queue.flush()
    assert done == ["handed over"]


def test_a_limit_holds_a_byte_at_least():
    with pytest.raises(ValueError, match="limit 0 must be at least 1 byte"):
        Later(limit=0)

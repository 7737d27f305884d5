"""What goes wrong beside a window: a store that refuses, and patches formed in another thread."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kamera.errors import CorruptChunk, NotKept, StoreError, StoreVersionError
from kamera.ops import NO_KV, kv_of
from kamera.patches import Later, Losses, Owed, Strict, forming_of
from kamera.patches.forming import BackgroundForming
from kamera.store import ChunkStore

NOTHING = Owed(ChunkStore.open("memory://"), ())


@pytest.fixture
def forming():
    made = BackgroundForming(Later())
    yield made
    made.close()


# -- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreError("full"), StoreVersionError("newer"), OSError("gone")])
def test_a_store_error_is_noted_where_it_happened_and_warned_of_once(error):
    losses, notes = Losses(), []
    with (
        pytest.warns(NotKept, match="a thing was lost"),
        losses.told_to(notes),
        losses.borne("a thing was lost"),
    ):
        raise error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with losses.told_to(notes), losses.borne("another was"):
            raise error
    assert notes == [f"a thing was lost: {error}", f"another was: {error}"]


def test_other_errors_pass():
    for error in (CorruptChunk("damaged"), ValueError("ours")):
        with pytest.raises(type(error)), Losses().borne("a thing"):
            raise error


def test_a_note_is_of_its_own_thread_and_operation():
    losses, notes = Losses(), []
    losses.note("outside of an operation")
    with losses.told_to(notes), ThreadPoolExecutor(1) as pool:
        pool.submit(losses.note, "another thread's").result()
        losses.note("one line")
    losses.note("after it")
    assert notes == ["one line"]


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_equal_losses_of_an_operation_are_one_note_of_one_line():
    losses, notes = Losses(), []
    for _ in range(2):
        with losses.told_to(notes), losses.borne("a thing"):
            raise StoreError("no\n  room")
    assert notes == ["a thing: no room"]


def test_a_job_tolerates_no_loss():
    with pytest.raises(StoreError, match="full"), Strict().borne("a thing"):
        raise StoreError("full")


# -- forming -----------------------------------------------------------------------------------


def test_a_rule_names_when_patches_are_formed_and_proofs_put_it_off():
    assert (
        type(forming_of("background", Later()))
        is type(forming_of(None, Later(), proving=True))
        is BackgroundForming
    )
    assert not isinstance(forming_of("now", Later(), proving=True), BackgroundForming)
    assert not isinstance(forming_of(None, Later()), BackgroundForming)
    with pytest.raises(ValueError, match="forming 'later' is none of now, background"):
        forming_of("later", Later())


def test_formed_now_is_formed_when_the_call_returns_and_its_error_is_the_callers():
    done: list[str] = []
    forming_of("now", Later()).submit("a", NO_KV, lambda: done.append("a") or NOTHING)
    assert done == ["a"]
    with pytest.raises(StoreError), ThreadPoolExecutor(1):
        forming_of("now", Later()).submit("a", NO_KV, _failing)


def _failing() -> Owed:
    raise StoreError("full, says the test")


def test_a_chunk_is_settled_when_its_own_patches_are_stored(forming):
    go, done = threading.Event(), []
    forming.submit("a", NO_KV, lambda: done.append(go.wait(60)) or NOTHING)
    forming.settle("b")
    assert done == []
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(forming.settle, "a")
        assert not settled.done()
        go.set()
        settled.result(60)
    assert done == [True]


def test_a_patch_that_is_needed_is_formed_before_others(forming):
    go, formed = threading.Event(), []
    forming.submit("gate", NO_KV, lambda: [NOTHING, go.wait(60)][0])
    for name in ("other", "needed"):
        forming.submit(name, NO_KV, lambda name=name: formed.append(name) or NOTHING)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(forming.settle, "needed")
        while forming._queue._waiting[0].name != "needed":
            time.sleep(0.001)
        go.set()
        settled.result(60)
    forming.flush()
    assert formed == ["needed", "other"]


def test_patches_are_handed_over_without_waiting_and_dropped_over_the_queues_bytes(caplog):
    queue, go, told, formed = Later(limit=1000), threading.Event(), [], []
    forming = BackgroundForming(queue)
    forming.submit("a", NO_KV, lambda: [NOTHING, go.wait(60)][0])
    for name in "bcd":  # each holds 400 bytes, and none of the calls waits
        deltas = kv_of([{"k": torch.zeros(100)}])
        forming.submit(name, deltas, lambda name=name: formed.append(name) or NOTHING, (), told.append)
    assert told == ["later work held more than its 1000 bytes"]
    go.set()
    forming.flush()
    forming.settle("b")
    assert formed == ["c", "d"]


def test_an_error_is_raised_by_the_next_flush_and_by_no_other(forming, caplog):
    forming.submit("a" * 64, NO_KV, _failing)
    forming.settle("a" * 64)
    assert "a patch of chunk aaaaaaaaaaaa was not stored" in caplog.text
    with pytest.raises(StoreError, match="full"):
        forming.flush()
    forming.flush()


def test_what_comes_after_the_close_is_formed_at_once(forming):
    forming.close()
    seen: list[int] = []
    forming.submit("a", NO_KV, lambda: seen.append(threading.get_ident()) or NOTHING)
    assert seen == [threading.get_ident()]

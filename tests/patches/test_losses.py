"""What goes wrong beside a window: a store that refuses."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from kamera.errors import CorruptChunk, NotKept, StoreError, StoreVersionError
from kamera.patches import Losses, Strict


@pytest.mark.parametrize("error", [StoreError("full"), StoreVersionError("newer"), OSError("gone")])
def test_a_store_error_is_noted_where_it_happened_and_warned_of_once(error):
    losses, notes = Losses(), []
    with (
        pytest.warns(NotKept, match="a thing was lost"),
        losses.note_in(notes),
        losses.absorb_errors("a thing was lost"),
    ):
        raise error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with losses.note_in(notes), losses.absorb_errors("another was"):
            raise error
    assert notes == [f"a thing was lost: {error}", f"another was: {error}"]


def test_other_errors_pass():
    for error in (CorruptChunk("damaged"), ValueError("ours")):
        with pytest.raises(type(error)), Losses().absorb_errors("a thing"):
            raise error


def test_a_note_is_of_its_own_thread_and_operation():
    losses, notes = Losses(), []
    losses.note("outside of an operation")
    with losses.note_in(notes), ThreadPoolExecutor(1) as pool:
        pool.submit(losses.note, "another thread's").result()
        losses.note("one line")
    losses.note("after it")
    assert notes == ["one line"]


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_equal_losses_of_an_operation_are_one_note_of_one_line():
    losses, notes = Losses(), []
    for _ in range(2):
        with losses.note_in(notes), losses.absorb_errors("a thing"):
            raise StoreError("no\n  room")
    assert notes == ["a thing: no room"]


def test_a_job_tolerates_no_loss():
    with pytest.raises(StoreError, match="full"), Strict().absorb_errors("a thing"):
        raise StoreError("full")

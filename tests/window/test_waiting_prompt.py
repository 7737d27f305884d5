"""A system prompt that waits to be stored is no chunk: what looks for chunks neither finds it nor waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import UnknownChunk
from kamera.patches import Worth, later_of
from kamera.patches.owed import waiting_records
from kamera.window import former_of
from tests.models import samples
from tests.window.rig import SYSTEM, rig

POLICY = ReusePolicy(tolerance=None)
SOON = 20


@pytest.fixture
def chunk() -> Chunk:
    return rig("llama_mqa")[0].chunk_from_tensors(samples.text_ids(12, seed=1), label="t")


@pytest.fixture
def window(chunk: Chunk) -> Iterator[KameraWindow]:
    """A window whose system prompt waits behind other later work; a chunk was archived behind another one."""
    backbone, store, opened = rig("llama_mqa")[0], ChunkStore.open("memory://"), threading.Event()
    before = KameraWindow(backbone, store, SYSTEM, policy=POLICY)
    before.append(chunk)
    before.slide()
    before.flush()
    later_of(backbone).add(lambda: opened.wait() and None, Worth.CHUNK)
    try:
        made = KameraWindow(backbone, store, SYSTEM[:3], policy=POLICY)
        assert len(store.ls("anchor")) == 1
        yield made
        assert len(store.ls("anchor")) == 1, "it has waited all the while"
    finally:
        opened.set()
        later_of(backbone).flush()
    assert len(store.ls("anchor")) == 2 and waiting_records(store).anchors == {}


@pytest.mark.parametrize("ask", ["recall", "plan_recall"])
def test_it_is_recalled_as_no_chunk(window, ask):
    with pytest.raises(UnknownChunk):
        getattr(window, ask)(former_of(window).anchor.digest)


def test_a_recall_by_the_beginning_of_an_id_does_not_wait_for_it(window, chunk):
    recall = threading.Thread(target=window.recall, args=(chunk.id[:9],), daemon=True)
    recall.start()
    recall.join(SOON)
    assert not recall.is_alive(), "it waits for all later work"
    assert [slot.chunk_id for slot in window.slots] == [chunk.id]


def test_no_plan_counts_it_among_the_chunks_that_are_to_be_stored(window):
    assert window._stage.limits(window._state, {}, POLICY).pending == frozenset()

"""Patches held short by bytes: what a window forms, serves and keeps under `ReusePolicy.patch_bytes`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.ops import budget, kv_bytes
from kamera.testbed.world import World
from kamera.window import former_of, keep_orbit

SHARE = 0.03
POLICY = ReusePolicy(patch_bytes=SHARE, forms="always")


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(autouse=True)
def small_chunks_count_too(monkeypatch):
    """The shipped backbone's chunks are small: let the share cut their patches as it cuts large ones."""
    monkeypatch.setattr(budget, "SMALL", 0)


@pytest.fixture(scope="module")
def episode():
    return World(7).episode(0, layout="LLI")


def window_of(backbone, episode, store, policy, order=(0, 1, 2)) -> KameraWindow:
    window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
    for i in order:
        window.append(backbone.chunk(episode.frames[i].content))
    return window


def patch_of_last(window: KameraWindow):
    info = next(i for i in former_of(window).store.ls("exact") if i.chunk_id == window.slots[-1].chunk_id)
    record = former_of(window).store.get_patch(info.context, info.chunk_id, info.antecedents)
    canonical = former_of(window).store.get_canonical(info.context, info.chunk_id)
    return record, kv_bytes(canonical.kv)


def test_three_percent_of_the_bytes_answer_as_a_re_prefill_does(backbone, episode):
    window = window_of(backbone, episode, ChunkStore.open("memory://"), POLICY)
    record, kv = patch_of_last(window)
    assert 0.02 * kv < record.patch.nbytes <= SHARE * kv
    assert record.info["asked_share"] == SHARE and record.info["asked_rank"] == 32
    last = window.slots[2].chunk_id
    window.evict(2)
    report = window.recall(last)
    assert report.forwards == 0 and report.slot.guarantee == "patched"
    assert report.bytes_patched == record.patch.nbytes
    fresh = window_of(backbone, episode, ChunkStore.open("memory://"), replace(POLICY, minimum="exact"))
    blind = window.fork()
    blind.condition(2, False)
    asked = [episode.ask(*s) for s in episode.subjects(["value"])]
    asked = [q for q in asked if q.bound and q.hops == 2][:8]
    assert len(asked) == 8

    def answers(of):
        return [of.next_token_logits(q.text).argmax().item() for q in asked]

    wanted = answers(fresh)
    assert sum(a == b for a, b in zip(answers(window), wanted, strict=True)) >= 7
    assert sum(a == b for a, b in zip(answers(blind), wanted, strict=True)) <= 3


def test_a_smaller_patch_than_asked_misses_and_a_larger_serves(backbone, episode):
    store = ChunkStore.open("memory://")
    window_of(backbone, episode, store, replace(POLICY, patch_bytes=0.01))
    window = window_of(backbone, episode, store, POLICY, order=(0, 1))
    chunk = backbone.chunk(episode.frames[2].content)
    assert window.append(chunk).forwards > 0
    record, kv = patch_of_last(window)
    assert 0.02 * kv < record.patch.nbytes <= SHARE * kv  # the longer one took the shorter one's place
    for share in (SHARE, 0.01):
        again = window_of(backbone, episode, store, replace(POLICY, patch_bytes=share), order=(0, 1))
        assert again.append(chunk).forwards == 0
    assert patch_of_last(again)[0].info["asked_share"] == SHARE  # and no shorter one takes its


def test_without_patch_bytes_the_rank_alone_decides(backbone, episode):
    store = ChunkStore.open("memory://")
    window = window_of(backbone, episode, store, ReusePolicy(rank=3, patch_bytes=None, forms="always"))
    record, _ = patch_of_last(window)
    assert {f.rank for layer in record.patch.layers for f in layer.values()} == {3}
    assert record.info["asked_share"] is None
    # a patch that bytes have cut is not what such a policy asks for
    other = ChunkStore.open("memory://")
    window_of(backbone, episode, other, replace(POLICY, rank=3, patch_bytes=0.005))
    window = window_of(
        backbone, episode, other, ReusePolicy(rank=3, patch_bytes=None, forms="always"), order=(0, 1)
    )
    assert window.append(backbone.chunk(episode.frames[2].content)).forwards > 0


def test_an_orbit_patch_keeps_to_the_bytes_too(backbone, episode):
    store = ChunkStore.open("memory://")
    window = window_of(backbone, episode, store, replace(POLICY, minimum="orbit"))
    keep_orbit(window, 2)
    info = next(i for i in store.ls("orbit"))
    record = store.get_patch(info.context, info.chunk_id, info.antecedents, "orbit")
    canonical = store.get_canonical(info.context, info.chunk_id)
    assert 0 < record.patch.nbytes <= SHARE * kv_bytes(canonical.kv)
    assert record.info["asked_share"] == SHARE

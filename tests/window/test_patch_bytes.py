"""Patches held short by bytes: what a window forms, serves and keeps under `ReusePolicy.patch_bytes`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.ops import budget, kv_bytes
from kamera.testbed.world import World
from kamera.window import former_of

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
    window.flush()
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

"""What becomes of chunks that stay when others leave: kept, repaired or prefilled again."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.window import former_of, requests
from tests.window.rig import FULL_RANK, guarantees, is_a_reprefill, make, rig, watching

REPAIR = ReusePolicy(rank=FULL_RANK, on_leave="repair", on_miss="prefill", forms="always")


@functools.cache
def of_five() -> ChunkStore:
    """Five chunks, and the patches of the second to the fourth without the first.

    Windows that prefill on a miss add nothing to it.
    """
    backbone, chunks = rig("qwen2_5_vl", 5)
    store = ChunkStore.open("memory://")
    make(backbone, store, *chunks)
    make(backbone, store, *chunks[1:4])
    return store


def slid(window: KameraWindow, way: str = "slide") -> tuple[list[str], int]:
    """What the chunks that stay are worth, and the forwards that costs; a plan says the same before."""
    given = () if way == "slide" else (0,)
    planned = window.plan(getattr(requests, way.title())(*given))
    with watching(former_of(window).backbone) as seen:
        report = getattr(window, way)(*given)
    assert planned.cost.forwards == report.forwards == seen.forwards
    return guarantees(window), seen.forwards


@pytest.mark.parametrize("way", ["slide", "evict"])
def test_kept_chunks_are_survivors_of_no_forward(way):
    backbone, chunks = rig("qwen2_5_vl", 4)
    assert slid(make(backbone, None, *chunks), way) == (["exact", "survivor", "survivor"], 0)


@pytest.mark.parametrize("way", ["slide", "evict"])
def test_a_repair_runs_a_forward_where_nothing_is_stored(way):
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks, policy=REPAIR)
    assert slid(window, way) == (["exact"] * 3, 1)  # the leading one is its canonical, the others share it
    assert is_a_reprefill(window, chunks)


def test_a_repair_takes_stored_patches_first_then_a_forward():
    backbone, chunks = rig("qwen2_5_vl", 5)
    store = of_five()
    window = make(backbone, store, *chunks, policy=REPAIR)
    assert slid(window) == (["exact", "patched", "patched", "patched"], 1)  # a forward behind patched KV


def test_a_repair_never_serves_less_than_a_survivor():
    backbone, chunks = rig("qwen2_5_vl", 4)
    policy = replace(REPAIR, minimum="blind", on_miss="blind", max_divergence=1.0)
    window = make(backbone, None, *chunks, policy=policy)
    assert slid(window) == (["exact"] * 3, 2)


def test_exact_prefills_the_chunks_that_stay():
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks)
    window.slide()  # survivors, which a prefill may not attend to
    window = make(backbone, None, *chunks, on_leave="exact")
    assert slid(window) == (["exact"] * 3, 2)
    assert is_a_reprefill(window, chunks)
    window = make(backbone, of_five(), *chunks, on_leave="exact")
    assert set(guarantees(window)[1:]) == {"patched"}
    assert slid(window, "evict")[0] == ["exact"] * 3


def test_chunks_that_arrive_follow_the_minimum_alone():
    """A repair makes room for a chunk, and that one is no chunk that stays."""
    backbone, chunks = rig("qwen2_5_vl", 5)
    store = of_five()
    length = 4 + sum(c.num_tokens for c in chunks[:4])
    window = make(backbone, store, *chunks[:4], policy=REPAIR, max_tokens=length)
    report = window.recall(chunks[4].id)
    assert len(report.evicted) == 1 and report.forwards == 1
    assert guarantees(window) == ["exact", "patched", "patched", "patched"]


def test_the_argument_goes_before_the_policy_and_is_saved(tmp_path):
    backbone, chunks = rig("qwen2_5_vl", 2)
    store, policy = ChunkStore.open("memory://"), replace(REPAIR, on_leave="keep")
    window = make(backbone, store, *chunks, policy=policy, on_leave="repair")
    assert window.policy == replace(REPAIR)
    window.save(tmp_path / "w")
    again = KameraWindow.load(tmp_path / "w", backbone, store)
    assert again.policy.on_leave == "repair"
    with pytest.raises(ValueError, match="on_leave 'never' is none of keep, repair, exact"):
        make(backbone, on_leave="never")

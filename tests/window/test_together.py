"""Canonicals that one operation owes are later work of one forward, where the engine's rows may share one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.window import Arrange, Reorder, former_of
from tests.engines.compare import worst
from tests.models.hooks import hooked
from tests.window.rig import SYSTEM, rig, watching

DEFAULT = ReusePolicy(audit=0.0)
"""The policy of users; audits are forwards of their own."""


@pytest.fixture(scope="module")
def shipped() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=6).frames]


def window_of(backbone, contents, system=SYSTEM) -> KameraWindow:
    window = KameraWindow(backbone, ChunkStore.open("memory://"), system, policy=DEFAULT)
    for content in contents:
        window.append(content)
    window.flush()
    return window


def canonicals(window, ids) -> list:
    return [former_of(window).store.get_canonical(former_of(window).context, chunk_id).kv for chunk_id in ids]


@contextmanager
def failing_beside(backbone):
    """The model, but it has no memory for two rows."""

    def fail(module, arguments, options) -> None:
        hidden = arguments[0] if arguments else options["hidden_states"]
        if hidden.shape[0] > 1:
            raise torch.OutOfMemoryError("says the test")

    last = backbone.decoder.layers[-1]
    with hooked(backbone, (last.register_forward_pre_hook, fail), with_kwargs=True):
        yield


def test_what_leaves_together_is_archived_by_one_forward(shipped, frames):
    window = window_of(shipped, frames[:5])
    ids = [slot.chunk_id for slot in window.slots[:4]]
    plan = window.plan_slide(4)
    with watching(shipped, later=True) as seen:
        report = window.slide(4)
        now = seen.forwards
        window.flush()
    owed = 3  # the leading one's KV was its canonical
    assert now == report.forwards and seen.forwards - now == plan.later.forwards == 1
    assert seen.tokens - sum(seen.spans[:now]) == plan.later.tokens == owed * window[0].length
    one_by_one = window_of(shipped, frames[:5])
    for _ in range(4):
        one_by_one.evict(0)
        one_by_one.flush()
    pairs = zip(canonicals(window, ids), canonicals(one_by_one, ids), strict=True)
    assert max(worst(together, alone) for together, alone in pairs) <= 1e-5


@pytest.mark.parametrize(("family", "forwards"), [("qwen2_5_vl", 1), ("kimi_k25", 3)])
def test_experts_run_each_chunk_alone(family, forwards):
    """The arithmetic of an expert depends on the other rows."""
    own, chunks = rig(family, 5)
    window = window_of(own, chunks[:4])
    lengths = {slot.length for slot in window.slots[1:4]}
    plan = window.plan(Arrange([window[0]]))
    with watching(own, later=True) as seen:
        window.run(Arrange([window[0]]))
        window.flush()
    assert len(lengths) == 1 and seen.forwards == plan.later.forwards == forwards


def test_chunks_of_two_lengths_are_two_forwards(shipped, frames):
    notes = ["value of tag 1?", "value of tag 2?"]
    window = window_of(shipped, [*frames[:3], *notes])
    plan = window.plan(Arrange([window[0]]))
    with watching(shipped, later=True) as seen:
        window.run(Arrange([window[0]]))
        window.flush()
    assert plan.later.forwards == seen.forwards == 2


def test_patches_that_are_owed_together_share_the_forward_of_their_canonicals(shipped, frames):
    # proofs are forwards of their own
    policy = ReusePolicy(audit=0.0)
    window = KameraWindow(shipped, ChunkStore.open("memory://"), SYSTEM, policy=policy)
    for frame in frames[:4]:
        window.append(frame)
    window.reorder([0, 2, 3, 1])
    window.flush()
    plan = window.plan(Reorder([0, 3, 1, 2]))
    with watching(shipped, later=True) as seen:
        report = window.run(plan)
        now = seen.forwards
        window.flush()
    assert now == report.forwards
    assert seen.forwards - now == plan.later.forwards == 1
    assert len(former_of(window).store.ls("exact")) == 3


def test_where_a_batch_has_no_memory_its_chunks_run_one_by_one(shipped, frames):
    window = KameraWindow(shipped, ChunkStore.open("memory://"), SYSTEM, policy=DEFAULT)
    for frame in frames[:4]:
        window.append(frame)
    ids = [slot.chunk_id for slot in window.slots]
    with failing_beside(shipped), watching(shipped, later=True) as seen:
        before = window.usage()
        window.slide(4)
        window.flush()
    assert len(canonicals(window, ids)) == 4
    ran = window.usage().background.forwards - before.later.forwards
    assert ran == seen.forwards == 4, "a forward that fails has begun"

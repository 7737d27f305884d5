"""What is archived as a canonical is one: the KV that the model computes behind the anchor alone."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import PolicyRefused
from kamera.window import former_of
from tests.engines.compare import worst
from tests.window.rig import SYSTEM, Prefilled, rig

BOUND = 1e-4

POLICIES = {
    "default": ReusePolicy(),
    "survivors": ReusePolicy(on_leave="keep"),
    "exact": ReusePolicy(on_leave="exact"),
    "always": ReusePolicy(forms="always"),
}

OPERATIONS = st.sampled_from(
    ["append", "slide", "evict", "reorder", "recall", "condition", "replace", "insert"]
)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "deepseek_v3"])
def pieces(request):
    return rig(request.param)


def do(window: KameraWindow, name: str, chunks: list, at: int) -> None:
    """One operation at a place, if the window allows it."""
    inside = {slot.chunk_id for slot in window.slots}
    outside = [c for c in chunks if c.id not in inside]
    place = at % max(1, len(window))
    if name in ("append", "recall") and outside:
        window.append(outside[at % len(outside)])
    elif name == "insert" and outside:
        window.insert(place, outside[at % len(outside)])
    elif not len(window):
        return
    elif name == "slide":
        window.slide()
    elif name == "evict":
        window.evict(place)
    elif name == "reorder":
        window.reorder([*range(1, len(window)), 0])
    elif name == "condition":
        window.condition(place, on=not window.slots[place].conditioned)
    elif name == "replace" and outside:
        window.replace(place, outside[at % len(outside)])


def check(window: KameraWindow, chunks: list) -> int:
    """Hold every stored canonical against the model's own; returns how many there are."""
    window.flush()
    stored = 0
    for chunk in chunks:
        record = former_of(window).store.get_canonical(former_of(window).context, chunk.id)
        if record is not None:
            stored += 1
            assert worst(record.kv, Prefilled(former_of(window).backbone, [chunk]).kv(0)) < BOUND, chunk.label
    return stored


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_that_leave_from_any_place_are_archived_as_the_model_computes_them_alone(pieces, policy):
    backbone, chunks = pieces
    window = KameraWindow(backbone, ChunkStore.open("memory://"), SYSTEM, policy=POLICIES[policy])
    for chunk in chunks:
        window.append(chunk)
    window.evict(2)
    window.slide(2)
    window.reorder([0])
    window.slide()
    assert check(window, chunks) == len(chunks)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["default", "survivors"])
@given(steps=st.lists(st.tuples(OPERATIONS, st.integers(0, 5)), min_size=2, max_size=8))
@settings(max_examples=5, deadline=None)
def test_no_operation_archives_kv_that_was_computed_behind_others(pieces, policy, steps):
    backbone, chunks = pieces
    window = KameraWindow(backbone, ChunkStore.open("memory://"), SYSTEM, policy=POLICIES[policy])
    for chunk in chunks[:2]:
        window.append(chunk)
    for name, at in steps:
        with suppress(PolicyRefused):  # behind a chunk whose conditioning is off
            do(window, name, chunks, at)
    if len(window):
        window.slide(len(window))
    assert check(window, chunks) >= 2

"""Clean views and branches: reversible to the bit, and nobody else's business."""

from __future__ import annotations

import pytest

from kamera.ops import relocate_kv, uniform_offset
from kamera.window import former_of, sequence_of
from tests.engines.compare import worst
from tests.window.rig import (
    Prefilled,
    Snapshot,
    distance,
    guarantees,
    live,
    make,
    rig,
    rope_index,
    shares,
    watching,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25"])
def test_conditioning_off_and_on_restores_every_bit(family):
    backbone, chunks = rig(family)
    store = former_of(make(backbone, None, *chunks[:2])).store
    window = make(backbone, store, *chunks)  # exact, patched, patched behind it, patched
    window.slide()
    window.recall(chunks[0].id)
    for index in range(len(window)):
        before = Snapshot.of(window)
        window.condition(index, False)
        if index:
            assert not before.matches(window)
        assert guarantees(window)[index] == ("blind" if index else "exact")
        window.condition(index, True)
        assert before.matches(window)


def test_a_clean_view_is_the_canonical_at_the_slots_place():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks[:2])
    slot = window.condition(1, False).slot
    assert (slot.guarantee, slot.rank, slot.antecedents, slot.conditioned) == ("blind", 0, (), False)
    home = rope_index(backbone, [chunks[1]])[:, 4:]
    offset = uniform_offset(home, sequence_of(window).position_ids[:, slot.start :])
    canonical = former_of(window).store.get_canonical(former_of(window).context, chunks[1].id)
    assert worst(live(window, 1), relocate_kv(canonical.kv, backbone.layout, offset)) <= 1e-6


def test_a_prefill_behind_a_clean_view_is_no_better_than_it():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks[:2])
    window.condition(1, False)
    window.append(chunks[2])
    assert guarantees(window) == ["exact", "blind", "blind"]
    patches = [i for i in former_of(window).store.ls("exact") if i.chunk_id == chunks[2].id]
    assert patches == []  # what it absorbed is nobody's patch
    window.condition(1, True)
    assert guarantees(window) == ["exact", "exact", "blind"]
    assert distance(window, 2, Prefilled(backbone, chunks[:3])) > 1e-3


# -- forks -----------------------------------------------------------------------------------------


def test_a_fork_costs_nothing_and_shares_every_tensor():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks)
    with watching(backbone) as seen:
        branch = window.fork()
    assert (seen.forwards, seen.encodes) == (0, 0)
    assert all(shares(window, branch, i) for i in range(4))


OPERATIONS = {
    "append": lambda w, c: w.append(c[0]),
    "recall": lambda w, c: w.recall(c[0].id, move=True),
    "slide": lambda w, c: w.slide(),
    "evict": lambda w, c: w.evict(1),
    "reorder": lambda w, c: w.reorder([2, 1, 0, 3]),
    "condition": lambda w, c: w.condition(2, False),
    "generate": lambda w, c: w.generate([3, 4], keep=True, max_new_tokens=2, do_sample=False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("changed", ["branch", "window"])
def test_what_one_branch_does_never_shows_in_the_other(operation, changed):
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks)
    branch = window.fork()
    moving, resting = (branch, window) if changed == "branch" else (window, branch)
    before = Snapshot.of(resting)
    OPERATIONS[operation](moving, chunks)
    assert not before.matches(moving)
    assert before.matches(resting)

"""Random operations on windows that serve composed patches: plans hold, and labels are honest."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, ReusePolicy
from tests.window.rig import guarantees, make, rig
from tests.window.test_against_reprefill import (
    EVERYTHING,
    QUICK,
    apply,
    assert_exact_at_its_own_positions,
    assert_positions_are_the_models,
    sequences,
)
from tests.window.test_planned import OPERATIONS, planned_and_run

RANK = 4
POLICIES = {
    "minimum": ReusePolicy(
        minimum="composed", rank=RANK, on_miss="prefill", max_doubt=1.0, composed_up_to=6, forms="always"
    ),
    "repair": ReusePolicy(
        rank=RANK, on_miss="prefill", on_leave="repair", max_doubt=1.0, composed_up_to=6, forms="always"
    ),
    "doubt": ReusePolicy(
        minimum="composed",
        rank=RANK,
        on_miss="prefill",
        on_leave="repair",
        max_doubt=0.1,
        composed_up_to=6,
        forms="always",
    ),
}
"""None of them stores a patch on a miss, so that orders stay unformed from one example to the next."""


@functools.cache
def formed(kv: str) -> ChunkStore:
    """The terms of all chunks."""
    backbone, chunks = rig("qwen2_5_vl", 5)
    store = ChunkStore.open("memory://", kv=kv)
    window = make(backbone, store, *chunks, policy=ReusePolicy(rank=RANK, on_miss="prefill", forms="always"))
    window.form_pairs()
    window.flush()
    return store


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, phases=QUICK)
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=9), kv=st.sampled_from(["as-is", "int8"]))
def test_what_was_planned_is_what_is_measured(name, operations, kv):
    backbone, chunks = rig("qwen2_5_vl", 5)
    window = make(backbone, formed(kv), *chunks[:3], policy=POLICIES[name], max_tokens=60)
    for what, planned, measured in planned_and_run(window, chunks, operations):
        assert planned == measured, what


@pytest.mark.parametrize("name", ["minimum", "repair"])
def test_labels_are_honest_where_orders_are_composed(name):
    backbone, chunks = rig("qwen2_5_vl", 5)
    served: set[str] = set()

    @settings(max_examples=12, phases=QUICK)
    @given(operations=sequences(*EVERYTHING, least=3, most=6))
    def hold(operations) -> None:
        window = make(backbone, formed("as-is"), *chunks[:5], policy=POLICIES[name])
        for operation in operations:
            if apply(window, chunks, operation) is None:
                continue
            if not any(window._state.shift):
                assert_positions_are_the_models(window, chunks)
            assert_exact_at_its_own_positions(window, chunks)
            for i, slot in enumerate(window.slots):
                if slot.guarantee == "composed":
                    assert slot.antecedents == tuple(s.chunk_id for s in window.slots[:i])
                    assert len(set(slot.antecedents)) == i >= 3
            served.update(guarantees(window))

    hold()
    assert "composed" in served

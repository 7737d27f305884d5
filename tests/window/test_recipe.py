"""A recipe says all that another engine needs: from it and a store the very same KV can be put together."""

from __future__ import annotations

import json

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.ops import apply_patch
from kamera.patches import later_of
from tests.engines.compare import worst
from tests.window.rig import FULL_RANK, make, rig

FORMING = ReusePolicy(rank=FULL_RANK, forms="always")


@pytest.fixture
def window():
    backbone, chunks = rig("qwen2_5_vl", 4)
    with ChunkStore.open("memory://") as store:
        window = make(backbone, store, *chunks[:3], policy=FORMING)
        later_of(backbone).flush()
        yield window


def test_a_recipe_tells_tokens_borders_places_and_guarantees(window):
    window.reorder([1, 0, 2])
    window.slide()
    recipe = window.recipe()
    assert recipe.ids == tuple(window.input_ids.tolist())
    assert recipe.anchor == window.anchor.length and recipe.context == window.context
    places = window.position_ids
    for part, slot in zip(recipe.parts, window.slots, strict=True):
        assert (part.chunk_id, part.guarantee) == (slot.chunk_id, slot.guarantee)
        assert (part.start, part.stop) == (slot.start, slot.start + slot.length)
        assert part.position == tuple(places[:, part.start : part.stop].amin(1).tolist())
    assert [part["chunk_id"] for part in json.loads(recipe.to_json())["parts"]] == [
        slot.chunk_id for slot in window
    ]


def test_stored_rows_turned_to_their_places_are_the_live_kv(window):
    """What an executor does: the canonical, its patch, and a rotation by the difference of two places."""
    first, second = window[0].chunk_id, window[1].chunk_id
    window.reorder([1, 0, 2])
    window.reorder([0, 1, 2]), window.evict(2)
    window.slide(2), window.recall(first), window.recall(second)
    recipe, backbone = window.recipe(), window.backbone
    assert [part.row is not None for part in recipe.parts] == [False, True]
    part = recipe.parts[1]
    canonical = window.store.get_canonical(recipe.context, part.chunk_id)
    stored = window.store.get_patch(recipe.context, part.row.chunk_id, part.row.antecedents)
    offset = tuple(b - a for a, b in zip(part.home, part.position, strict=True))
    shown = window.shown()[2]
    frame = int(shown.positions.amin()) - min(part.position)  # the live cache may stand moved as a whole
    offset = tuple(step + frame for step in offset)
    assert worst(window.kv(1), apply_patch(canonical.kv, stored.patch, backbone.layout, offset)) < 1e-5
    assert worst(window.kv(1), apply_patch(canonical.kv, None, backbone.layout, offset)) > 1e-3


def test_sequences_of_other_kv_have_other_salts(window):
    """Equal tokens whose KV differs must not meet in a prefix cache; a prefill's own need no salt."""
    kept, also, gapped = window.fork(), window.fork(), window.fork()
    assert window.recipe().salt == ""
    kept.slide(), also.slide(), gapped.slide(positions="keep")
    assert kept.recipe().salt == also.recipe().salt != ""
    assert gapped.recipe().salt not in ("", kept.recipe().salt)
    fresh = make(window.backbone, window.store, policy=ReusePolicy.exact())
    for chunk_id in [slot.chunk_id for slot in window][1:]:
        fresh.recall(chunk_id)
    assert fresh.recipe().ids == kept.recipe().ids
    assert fresh.recipe().salt == ""

"""A recipe says all that another engine needs: from it and a store the very same KV can be put together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import LiveExecutor, Part, Recipe, RowKey
from kamera.errors import IncompatibleChunk, InvalidRecipe, StaleRecipe
from kamera.ops import apply_patch, relocate_kv
from kamera.patches import background_of
from kamera.window import former_of, keep_kv, shown_spans
from tests.engines.compare import worst
from tests.window.rig import FULL_RANK, frame, make, over, rig, watching

FORMING = ReusePolicy(rank=FULL_RANK, forms="always")
FAMILIES = ("qwen2_5_vl", "deepseek_v3")  # GQA with M-RoPE, and MLA


@pytest.fixture
def window():
    backbone, chunks = rig("qwen2_5_vl", 4)
    with ChunkStore.open("memory://") as store:
        window = make(backbone, store, *chunks[:3], policy=FORMING)
        background_of(backbone).flush()
        yield window


def returned(window: KameraWindow) -> KameraWindow:
    """The window with a chunk that is served from its canonical and a patch."""
    first, second = window[0].chunk_id, window[1].chunk_id
    window.reorder([1, 0, 2]), window.reorder([0, 1, 2]), window.evict(2)
    window.slide(2), window.recall(first), window.recall(second)
    return window


def test_stored_rows_turned_to_their_places_are_the_live_kv(window):
    """What an executor does: the canonical, its patch, and a rotation by the difference of two places."""
    recipe, layout = returned(window).recipe(), former_of(window).backbone.layout
    assert [(part.kv.kind, part.patch is not None) for part in recipe.parts] == [
        ("canonical", False),
        ("canonical", True),
    ]
    part = recipe.parts[1]
    canonical = former_of(window).store.get_canonical(recipe.context, part.chunk_id)
    stored = former_of(window).store.get_patch(recipe.context, part.patch.chunk_id, part.patch.antecedents)
    moved = int(shown_spans(window)[2].positions.amin()) - min(
        part.position
    )  # the live cache may stand moved
    offset = tuple(step + moved for step in part.offset)
    assert worst(shown_spans(window)[2].kv, apply_patch(canonical.kv, stored.patch, layout, offset)) < 1e-5
    assert worst(shown_spans(window)[2].kv, apply_patch(canonical.kv, None, layout, offset)) > 1e-3


def test_sequences_of_other_kv_have_other_salts(window):
    """Equal tokens whose KV differs must not meet in a prefix cache; a prefill's own need no salt."""
    assert window.recipe().salt == ""  # its leading canonical alone
    kept, also = (keep_kv(window.fork()) for _ in range(2))
    assert kept.salt == also.salt != ""
    moved = window.fork()
    moved.slide()
    assert keep_kv(moved).salt not in ("", kept.salt)


def test_whatever_decides_the_kv_changes_the_salt(window):
    """Another patch, formation, rank, turn or place: another salt."""
    recipe = returned(window).recipe()
    first, second = recipe.parts

    def with_part(**changed) -> Recipe:
        return replace(recipe, parts=(first, replace(second, **changed)))

    def with_patch(**changed) -> Recipe:
        return with_part(patch=replace(second.patch, **changed))

    others = [
        with_patch(antecedents=("a" * 64,)),
        with_patch(kind="orbit"),
        with_patch(formed="survivor"),
        with_patch(rank=1),
        with_patch(created=1.0),
        with_part(patch=None),
        with_part(offset=tuple(step + 1 for step in second.offset)),
        with_part(position=tuple(step + 1 for step in second.position)),
    ]
    salts = [one.salt for one in others]
    assert recipe.salt not in salts and len(set(salts)) == len(salts)
    assert recipe.leading is recipe  # nothing of it is missing


# -- JSON ------------------------------------------------------------------------------------------


def test_a_recipe_comes_back_from_its_json(window):
    for recipe in (window.recipe(), returned(window).recipe(), keep_kv(window)):
        again = Recipe.from_json(recipe.to_json())
        assert again == recipe and again.salt == recipe.salt and again.to_json() == recipe.to_json()
        with pytest.raises(InvalidRecipe):
            Recipe.from_json(json.dumps(json.loads(recipe.to_json()), indent=1))


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", "{}", '{"parts": 3}', "[" * 100_000])
def test_text_that_is_no_recipe_is_refused_by_name(text):
    with pytest.raises(InvalidRecipe):
        Recipe.from_json(text)


# -- what stands in a window's memory alone --------------------------------------------------------


# -- executors -------------------------------------------------------------------------------------


def shows_the_same(window: KameraWindow, recipe: Recipe) -> bool:
    """A live cache shows the recipe's KV where its window shows it, to rounding."""
    executor, layout = LiveExecutor(*over(window)), former_of(window).backbone.layout
    executor.show(recipe)
    back = tuple(-step for step in frame(window))
    spans = enumerate(shown_spans(window)[1:], start=1)
    pairs = [(relocate_kv(span.kv, layout, back), executor.live.read(i)) for i, span in spans]
    return len(recipe.parts) == len(pairs) and max(worst(own, shown) for own, shown in pairs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_is_shown_as_its_window_shows_it(family):
    """Canonical, patched, conditioned and survivor slots: the same KV, and no forward."""
    backbone, chunks = rig(family, 4)
    with ChunkStore.open("memory://") as store:
        window = returned(make(backbone, store, *chunks[:3], policy=FORMING))
        window.append(chunks[3]), window.append(chunks[2])
        window.evict(0)
        recipe = keep_kv(window)
        assert {part.kv.kind for part in recipe.parts} == {"canonical", "conditioned"}
        with watching(backbone) as seen:
            assert shows_the_same(window, Recipe.from_json(recipe.to_json()))
        assert (seen.forwards, seen.encodes) == (0, 0)


@pytest.mark.few(4)
@pytest.mark.parametrize("how", ["tenant", "fingerprint", "kv", "gone", "reformed", "ids", "moved"])
def test_foreign_and_stale_recipes_are_refused_by_name(window, how):
    recipe = returned(window).recipe()
    first, second = recipe.parts
    own, store, wanted = recipe.context, former_of(window).store, StaleRecipe
    parts: tuple[Part, ...] = recipe.parts
    if how in ("tenant", "fingerprint", "kv"):
        own = replace(own, **{how: {"kv": "int8"}.get(how, "other")})
        told = "kind", "chunk_id", "antecedents", "base", "formed", "created", "rank"
        rows = (first.kv, second.kv, second.patch, recipe.anchor)
        *kvs, patch, anchor = [RowKey.of(own, *(getattr(row, name) for name in told)) for row in rows]
        parts = (replace(first, kv=kvs[0]), replace(second, kv=kvs[1], patch=patch))
        recipe, wanted = replace(recipe, context=own, anchor=anchor, parts=parts), IncompatibleChunk
    elif how == "gone":
        store = ChunkStore.open("memory://")
    elif how == "reformed":
        record = store.get_patch(own, second.chunk_id, second.patch.antecedents)
        store.put(replace(record, formed="exact", info={**record.info, "more": 1}))
    elif how == "ids":
        parts = (first, replace(second, ids=(*second.ids[:-1], second.ids[-1] + 1)))
        recipe = replace(recipe, parts=parts)
    else:
        moved = {name: tuple(step + 1 for step in getattr(second, name)) for name in ("position", "offset")}
        recipe = replace(recipe, parts=(first, replace(second, **moved)))
    with pytest.raises(wanted):
        LiveExecutor(former_of(window).backbone, store).show(recipe)

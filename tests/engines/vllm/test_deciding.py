"""What the connector decides from names, rows and configurations alone: no vLLM, no tensor read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore
from kamera.engines import Part, Recipe, RowKey
from kamera.engines.hf import HfEngine
from kamera.engines.vllm.layout import layout_of
from kamera.engines.vllm.serving import FIELD, StoredRows, recipe_of
from kamera.engines.vllm.stores import Stores
from kamera.errors import IncompatibleChunk, InvalidRecipe, UnsupportedBackbone
from kamera.ops import Blocks, ids_digest
from kamera.store import CanonicalRecord, Context, StoreAdmin
from tests.models.tiny import build

ANCHOR = (1, 2, 3)
CONTEXT = Context("f", ids_digest(ANCHOR))


def recipe(*names: str, patched: bool = True, context: Context = CONTEXT, missing: int = 99) -> Recipe:
    """Chunks of two tokens behind an anchor of three: the first exact, the others patched or blind."""
    parts, before = list[Part](), tuple[str, ...]()
    for i, name in enumerate(names):
        at, patch = 3 + 2 * i, None
        if patched and i:
            patch = replace(RowKey.of(context, "exact", name, before), formed="exact", created=1.0)
        gone = "not here" if i >= missing else ""
        parts.append(
            Part(
                name, (10 + i, 20 + i), at, (at,), (at - 3,),
                "exact" if not i else "patched" if patched else "blind", before if patched else (),
                None if gone else RowKey.of(context, "canonical", name), None if gone else patch, gone,
            )
        )  # fmt: skip
        before = (*before, name)
    return Recipe(context, RowKey.of(context, "anchor", context.anchor), ANCHOR, tuple(parts))


def asked(made: Recipe, tenant: str = "", fingerprint: str = "f"):
    return recipe_of({FIELD: made.to_json()}, [*made.ids, 7, 8], tenant, fingerprint)


@pytest.mark.parametrize("name", ["qwen3_vl", "deepseek_v3", "deepseek_v2", "llava"])
def test_the_layouts_of_tiny_models_are_those_of_their_configurations(name):
    model = build(name)
    config = getattr(model.config, "text_config", model.config)
    if name == "qwen3_vl":
        config.rope_parameters["mrope_interleaved"] = True  # as real checkpoints say, and vLLM reads
    assert _plain(layout_of(config).layers) == _plain(HfEngine(model, None).layout)


def test_a_model_whose_pages_nobody_has_compared_is_refused_by_name():
    config = build("glm4v").config.text_config  # it turns its keys in pairs, partly
    with pytest.raises(UnsupportedBackbone, match="glm4v_text"):
        layout_of(config)


def test_a_recipe_is_refused_that_is_not_of_this_prompt_tenant_or_model():
    made = recipe("a", "b")
    assert len(asked(made).leading.parts) == 2
    with pytest.raises(IncompatibleChunk, match="backbone"):
        asked(made, fingerprint="another")
    with pytest.raises(IncompatibleChunk, match="tenant"):
        asked(made, tenant="another")
    with pytest.raises(IncompatibleChunk, match="token ids"):
        recipe_of({FIELD: made.to_json()}, [*made.ids[:-1], 99, 7], "", "f")
    with pytest.raises(InvalidRecipe):
        recipe_of({FIELD: "{}"}, made.ids, "", "f")


def test_equal_recipes_share_a_salt_and_nobody_else_has_it():
    whole, blind = asked(recipe("a", "b")), asked(recipe("a", "b", patched=False))
    assert whole.salt == asked(recipe("a", "b")).salt != ""
    other = asked(recipe("a", "b", context=replace(CONTEXT, tenant="t")), tenant="t")
    assert len({whole.salt, blind.salt, other.salt, asked(recipe("a", "c")).salt}) == 4


def test_what_equals_a_prefill_is_shared_with_every_request_of_the_tenant():
    assert asked(recipe("a", "b", missing=1)).salt == ""  # the leading canonical alone
    assert asked(recipe("a", "b", missing=0)).salt == ""
    mine = replace(CONTEXT, tenant="t")
    assert asked(recipe("a", missing=0, context=mine), tenant="t").salt == "t"


def _record(key: RowKey, ids) -> CanonicalRecord:
    kv = Blocks([{"k": torch.zeros(1, 1, len(ids), 2)}], ((0,),))
    positions = torch.arange(len(ids))[None]
    kind = "anchor" if key.kind == "anchor" else "canonical"
    return CanonicalRecord(key.chunk_id, key.context, torch.tensor(ids), positions, kv, kind=kind)


def test_rows_decide_without_a_tensor_and_a_missed_object_is_looked_up_anew(tmp_path):
    made = asked(recipe("a", "b", patched=False))
    store = ChunkStore.open(tmp_path)
    for key, ids in ((made.anchor, ANCHOR), *((p.kv, p.ids) for p in made.parts)):
        store.put(_record(key, ids))
    rows = StoredRows(Stores(str(tmp_path)))
    own = rows._stores.of("")
    own.get_canonical = own.get_anchor = own.get_patch = None  # reading a record would fail
    assert rows.count_stored("r", made) == 2
    StoreAdmin(store).delete(made.parts[1].kv.key)
    assert rows.count_stored("r", made) == 2  # a row that was seen is a promise
    rows.forget(made)  # which a worker found broken
    assert rows.count_stored("r", made) == 1


def _plain(layers):
    """The layers without what differs by rounding: frequencies to seven digits."""
    return [
        [
            (
                c.name,
                c.heads,
                c.dim,
                c.rope and (c.rope.axes, c.rope.pairing, [f"{f:.5g}" for f in c.rope.inv_freq]),
            )
            for c in layer.channels
        ]
        for layer in layers
    ]

"""What the connector decides from names, rows and configurations alone: no vLLM, no tensor read."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kamera import ChunkStore, testbed
from kamera.engines import Part, Recipe, RowKey
from kamera.engines.hf import HfEngine
from kamera.engines.vllm import serving
from kamera.engines.vllm.counts import Counts
from kamera.engines.vllm.harvest import part_names
from kamera.engines.vllm.identity import check_version
from kamera.engines.vllm.layout import layout_of
from kamera.engines.vllm.serving import FIELD, StoredRows, check_places, recipe_of
from kamera.engines.vllm.stores import Stores
from kamera.errors import IncompatibleChunk, InvalidRecipe, UnsupportedBackbone
from kamera.ops import Blocks, digest, ids_digest
from kamera.store import CanonicalRecord, Context
from kamera.store.admin.admin import StoreAdmin
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


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0+cpu", "0.30.2+cpu"])
def test_versions_that_the_connector_was_run_on_start(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.3.0", "0.33.0", "0.300.0", "1.30.0", "dev"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(UnsupportedBackbone, match=re.escape(version)):
        check_version(version)


@pytest.mark.parametrize("decode, prefill", [(2, 1), (1, 2)])
def test_pages_that_workers_share_out_by_tokens_are_refused_by_name(decode, prefill):
    pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")
    from kamera.engines.vllm.connector import KameraConnector

    parallel = SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill)
    with pytest.raises(UnsupportedBackbone, match="start vLLM without decode_context_parallel_size"):
        KameraConnector(SimpleNamespace(parallel_config=parallel), None, None)


def test_the_layout_of_a_configuration_is_that_of_the_model():
    model, _ = testbed.load()
    mine = layout_of(model.config.text_config)
    theirs = HfEngine(model, None).layout
    assert _plain(mine.layers) == _plain(theirs)
    assert (mine.axes, mine.mla) == (3, False)


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


def test_scaled_rotary_positions_and_mixed_layers_are_refused_by_name():
    text = testbed.load()[0].config.text_config.to_dict()
    with pytest.raises(UnsupportedBackbone, match="'yarn'"):
        layout_of(SimpleNamespace(**{**text, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}))
    with pytest.raises(UnsupportedBackbone, match="full attention"):
        layout_of(SimpleNamespace(**{**text, "layer_types": ["full_attention", "sliding_attention"]}))


def test_a_request_without_a_recipe_is_left_alone():
    assert recipe_of(None, [1, 2], "", "f") is None
    assert recipe_of({"other": 1}, [1, 2], "", "f") is None


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


def test_parts_that_do_not_stand_where_the_engine_counts_them_are_refused():
    made = asked(recipe("a", "b"))
    check_places(made, torch.arange(9)[None])
    with pytest.raises(IncompatibleChunk, match="stands at"):
        check_places(made, torch.tensor([[0, 1, 2, 3, 4, 6, 7, 8, 9]]))


def test_what_is_supplied_ends_before_the_first_part_that_is_missing():
    made = asked(recipe("a", "b", "c", missing=1))
    assert made.leading.borders == (3, 5)


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


def test_a_chunk_that_is_said_to_be_exact_without_being_it_is_salted():
    made = recipe("a", "b", patched=False)
    liar = replace(made, parts=(made.parts[0], replace(made.parts[1], guarantee="exact")))
    assert asked(liar).salt != ""
    still = replace(made, parts=(made.parts[0], replace(made.parts[1], guarantee="exact", offset=(0,))))
    assert asked(still).salt != ""  # it does not turn, and stands behind another all the same


def test_a_longer_window_shares_the_pages_of_the_one_it_begins_with():
    assert asked(recipe("a", "b", "c", missing=2)).salt == asked(recipe("a", "b", "d", missing=2)).salt


def test_computed_chunks_are_named_by_what_was_shown_before_them():
    made = recipe("a", "b", "c")
    assert part_names(made, 3) == ("a", "b", "c")
    stale = replace(made.parts[1], antecedents=("x", "a"))
    shown = replace(made, parts=(made.parts[0], stale, made.parts[2]))
    survivor = "b~" + digest("kamera.lineage.v1", "x", "a")[:32]
    assert part_names(shown, 2) == ("a", survivor, "c")  # c is computed behind a survivor
    assert part_names(shown, 1) == ("a", "b", "c")  # b, too, is computed: behind a alone


class _Remote(Stores):
    """A store that waits, like one behind a network."""

    remote = True

    def __init__(self, store):
        super().__init__("memory://")
        self._store, self.answers = store, threading.Event()

    def of(self, tenant):
        assert self.answers.wait(10)
        return self._store


def _filled(made: Recipe) -> ChunkStore:
    store = ChunkStore.open("memory://")
    for key, ids in ((made.anchor, made.anchor_ids), *((p.kv, p.ids) for p in made.parts)):
        store.put(_record(key, ids))
    return store


def _record(key: RowKey, ids) -> CanonicalRecord:
    kv = Blocks([{"k": torch.zeros(1, 1, len(ids), 2)}], ((0,),))
    positions = torch.arange(len(ids))[None]
    kind = "anchor" if key.kind == "anchor" else "canonical"
    return CanonicalRecord(key.chunk_id, key.context, torch.tensor(ids), positions, kv, kind=kind)


def test_a_remote_is_asked_aside_and_the_request_waits():
    made = asked(recipe("a", "b", patched=False))
    stores = _Remote(_filled(made))
    rows = StoredRows(stores)
    assert rows.count_stored("r", made) is None
    stores.answers.set()
    while (found := rows.count_stored("r", made)) is None:
        pass
    assert found == 2


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


def test_without_the_anchor_nothing_is_supplied():
    made = asked(recipe("a", patched=False))
    store = ChunkStore.open("memory://")
    store.put(_record(made.parts[0].kv, made.parts[0].ids))
    stores = _Remote(store)
    stores.answers.set()
    rows = StoredRows(stores)
    while (found := rows.count_stored("r", made)) is None:
        pass
    assert found == -1


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


def test_a_recipe_is_freed_with_its_last_reference():
    made = recipe("a" * 64)
    assert made.leading.parts == made.parts
    seen = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert seen() is None
    finally:
        gc.enable()


def test_rows_seen_are_looked_up_again_once_there_are_too_many(monkeypatch):
    one, two = (asked(recipe(*names, patched=False)) for names in (("a", "b"), ("c", "d")))
    store, looked = _filled(one), list[int]()
    for part in two.parts:
        store.put(_record(part.kv, part.ids))
    monkeypatch.setattr(serving, "_REMEMBERED", 2)
    plain = serving.stored_keys
    monkeypatch.setattr(serving, "stored_keys", lambda of, keys: looked.append(len(keys)) or plain(of, keys))
    rows = StoredRows(SimpleNamespace(of=lambda tenant: store, remote=False))
    for n in range(4):
        assert rows.count_stored("r", (one, two)[n % 2]) == 2
    assert len(looked) > 2, "what was forgotten is looked up again"


def test_each_count_is_told_once():
    counts = Counts()
    counts.add("supplied_tokens", "canonical", 3)
    assert (counts.take(), counts.take()) == ({"supplied_tokens/canonical": 3}, {})
    counts.add("supplied_tokens", "canonical", 2)
    assert (counts.take(), counts.of("supplied_tokens")) == ({"supplied_tokens/canonical": 2}, 5)

"""An index made anew from a store finds the prompts that were served through it."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.errors import ForeignIndex
from kamera.patches import later_of
from kamera.reuse import CutRule, IndexFile, Media, Prompt, Scope, stored_prompts
from tests.models import samples
from tests.reuse.rig import FULL, HEAD, family, parts, prompt, reuser

RULE = CutRule()
NAME = "llama_mqa"


def served(store: ChunkStore, *asked: Prompt, name: str = NAME) -> Scope:
    """The scope of a model through which prompts were served."""
    one = reuser(family(name), store)
    for each in asked:
        one.prepare(each).run()
    later_of(one.backbone).flush()
    return Scope(family(name).fingerprint, "tokenizer", store.tenant)


def test_an_index_from_a_store_finds_what_was_served(tmp_path):
    a, b, c, d, question = parts()
    store = ChunkStore.open(tmp_path / "store")
    scope = served(store, prompt(a, b, c, question), prompt(a, d, question))
    path = tmp_path / "content.index"
    with IndexFile.rebuild(path, scope, RULE, store) as index:
        for spans in ((a, b, c), (a, d)):
            assert index.find(prompt(*spans, question)).prefix == len(HEAD) + sum(map(len, spans))
        moved = index.find(prompt(d, b, question))
        assert {(hit.start, hit.stop) for hit in moved.hits} >= {(18, 35)}  # b behind d
    with IndexFile(path, scope, RULE) as index:
        assert index.find(prompt(a, d, question)).prefix == 30


def test_prompts_with_which_another_begins_are_left_out():
    a, b, c, _, question = parts()
    store = ChunkStore.open("memory://")
    scope = served(store, prompt(a, b, question), prompt(a, b, c, question))
    found = [tuple(p.ids.tolist()) for p in stored_prompts(store, scope)]
    assert tuple(torch.cat([HEAD, a, b, c]).tolist()) in found
    assert not any(one != other and other[: len(one)] == one for one in found for other in found)


def test_a_damaged_object_is_left_out(tmp_path):
    a, b, c, _, question = parts()
    with ChunkStore.open(tmp_path / "store") as store:
        scope = served(store, prompt(a, b, question), prompt(c, question))
        (key,) = [info.key for info in store.ls("canonical") if info.tokens == len(b)]
    (file,) = [path for path in (tmp_path / "store").rglob("*") if key in path.name]
    held = bytearray(file.read_bytes())
    held[-9] ^= 1
    file.write_bytes(held)
    with ChunkStore.open(tmp_path / "store") as store:
        found = [p.ids.tolist() for p in stored_prompts(store, scope)]
    assert torch.cat([HEAD, c]).tolist() in found
    assert not any(b[0] in ids and ids[-len(b) :] == b.tolist() for ids in found)


def test_only_the_scopes_own_model_and_tenant_are_read(tmp_path):
    a, b, _, _, question = parts()
    store = ChunkStore.open("memory://")
    served(store, prompt(a, b, question), name="qwen2_5_vl")
    other = Scope(family(NAME).fingerprint, "tokenizer")
    assert list(stored_prompts(store, other)) == []
    path = tmp_path / "content.index"
    IndexFile.rebuild(path, other, RULE, [prompt(a, question)]).close()
    held = path.read_bytes()
    with pytest.raises(ForeignIndex, match="the store is of tenant ''"):
        IndexFile.rebuild(path, Scope(other.model, "tokenizer", "b"), RULE, store)
    assert path.read_bytes() == held


def test_a_picture_is_named_by_its_chunk():
    backbone, store = family("qwen2_5_vl"), ChunkStore.open("memory://")
    picture = samples.chunk(backbone, samples.sample("qwen2_5_vl", 1), "picture")
    window = KameraWindow(backbone, store, HEAD, policy=FULL)
    window.append(picture)
    window.append(backbone.chunk_from_tensors(parts()[0]))
    window.flush()
    (found,) = [p for p in stored_prompts(store, Scope(backbone.fingerprint, "t")) if len(p.media)]
    assert found.media == (Media(4, 4 + picture.num_tokens, picture.id),)
    assert found.ids.tolist() == window.input_ids.tolist()

"""Positions that are added up are the model's own, or are not added up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import IncompatibleChunk
from kamera.patches.chunks import Facts, compact_positions, text_positions
from tests.models import samples, tiny

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "llava", "kimi_k25")


def facts_of(family: str) -> tuple[object, list[Facts]]:
    backbone = tiny.backbone(family)
    chunks = [samples.chunk(backbone, samples.sample(family, seed)) for seed in range(3)]
    chunks.append(backbone.chunk_from_tensors(samples.text_ids(7, seed=5)))
    return backbone, [Facts(c.id, backbone.encode(c), "") for c in chunks]


@pytest.mark.parametrize("family", FAMILIES)
@given(order=st.lists(st.integers(0, 3), max_size=6), anchor=st.integers(0, 40))
@settings(max_examples=15)
def test_sums_of_extents_are_the_models_own_positions(family, order, anchor):
    backbone, pool = facts_of(family)
    chunks = [pool[i] for i in order]
    ids = [torch.zeros(anchor, dtype=torch.int64), *(c.encoded.input_ids for c in chunks)]
    question = torch.tensor([3, 4, 5])
    whole = backbone.positions([*ids, question], [{}, *(c.position_inputs for c in chunks), {}])
    assert all(backbone.extents.of_all([(c.chunk_id, c.encoded)]) for c in chunks)
    places = compact_positions(backbone, ids[0], chunks)
    tail = text_positions(backbone, ids[0], chunks, question)
    assert torch.equal(torch.cat([whole[:, :anchor], *places, tail], dim=1), whole)


def test_touching_pictures_are_left_to_the_model():
    """Each stands behind itself; the two together are what the model refuses, and so does the window."""
    backbone = tiny.backbone("qwen2_5_vl")
    chunk = samples.chunk(backbone, samples.sample("qwen2_5_vl", 0))
    kinds = chunk.inputs["mm_token_type_ids"].flatten().bool()
    grid = {n: t for n, t in chunk.inputs.items() if n != "mm_token_type_ids"}
    begin, end = int(kinds.nonzero()[0]), int(kinds.nonzero()[-1]) + 1
    text = samples.text_ids(3, seed=1)
    ends = backbone.chunk_from_tensors(torch.cat([text, chunk.input_ids[begin:end]]), **grid)
    begins = backbone.chunk_from_tensors(torch.cat([chunk.input_ids[begin:end], text]), **grid)
    facts = [Facts(c.id, backbone.encode(c), "") for c in (ends, begins)]
    for f in facts:
        assert backbone.extents.of_all([(f.chunk_id, f.encoded)]) is not None
    assert len(compact_positions(backbone, text, facts[::-1])) == 2
    with pytest.raises(IncompatibleChunk, match="right behind another"):
        backbone.positions([f.encoded.input_ids for f in facts], [f.position_inputs for f in facts])
    with pytest.raises(IncompatibleChunk, match="right behind another"):
        compact_positions(backbone, text, facts)

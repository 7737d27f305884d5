"""A row says a chunk's token digest, positions and media, and says nothing that its tensors do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops import tensor_digest
from kamera.store import ChunkStore, Outline
from tests.store.builders import CHUNK, CONTEXT, canonical, decode, drop_index, encode, join, split


@pytest.fixture
def record():
    made = canonical()
    return replace(made, outline=Outline.of(made.input_ids, made.positions, (7,) * 3, ("hash", "other")))


def test_the_outline_is_of_the_tensors(record):
    outline = record.outline
    assert outline.ids == tensor_digest(record.input_ids)
    assert outline.opening == tuple(record.input_ids[:16].tolist())
    assert outline.low == tuple(record.positions.amin(1).tolist())
    assert outline.high == tuple(record.positions.amax(1).tolist())


@pytest.mark.parametrize("index", ["as written", "made anew"])
def test_a_row_has_it_and_an_index_made_anew_has_it_again(tmp_path, record, index):
    with ChunkStore.open(tmp_path) as store:
        store.put(record)
    if index == "made anew":
        drop_index(tmp_path)
    with ChunkStore.open(tmp_path) as store:
        assert [row.outline for row in store.ls("canonical")] == [record.outline]
        assert store.info(CONTEXT, CHUNK).outline == record.outline
        assert store.get_canonical(CONTEXT, CHUNK).outline == record.outline


def test_a_record_without_one_gets_one(record):
    with ChunkStore.open("memory://") as store:
        store.put(replace(record, outline=None))
        found = store.info(CONTEXT, CHUNK).outline
    assert found == Outline.of(record.input_ids, record.positions)


@pytest.mark.parametrize("field", ["ids", "opening", "low", "high"])
def test_an_outline_of_other_tensors_is_refused(record, field):
    wrong = "0" * 64 if field == "ids" else tuple(n + 1 for n in getattr(record.outline, field))
    with pytest.raises(ValueError, match="outline"):
        replace(record, outline=replace(record.outline, **{field: wrong}))


@pytest.mark.parametrize(
    "change", [{"ids": 7}, {"media": [3]}, {"low": ["1"]}, {"advance": [True]}, {"more": 1}]
)
def test_a_malformed_outline_is_damage(record, change):
    data = encode(record, 1.0)
    outer, header, rest = split(data)
    forged = join(outer, header | {"outline": {**header["outline"], **change}}, rest)
    with pytest.raises(CorruptChunk):
        decode(forged, record.key, "here")


def test_an_outline_that_lies_about_the_tensors_is_damage(record):
    outer, header, rest = split(encode(record, 1.0))
    lying = {**header["outline"], "ids": tensor_digest(torch.arange(4))}
    with pytest.raises(CorruptChunk):
        decode(join(outer, header | {"outline": lying}, rest), record.key, "here")

"""Search: the same answers as going through all objects, whatever happened to the rows it keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import IncompatibleChunk, UnknownChunk
from kamera.store import (
    CanonicalRecord,
    ChunkStore,
    Context,
    EncodingRecord,
    StoreAdmin,
    encoding_context,
)
from kamera.store.search.embedding import mean_features, pack, picture_embedding, unpack
from tests.store.builders import CONTEXT, VISION, canonical, drop_index, encoding, file_of, flip, patch

WIDTH = 8
PICTURE = 9  # the id of picture tokens here
OTHER = Context(CONTEXT.fingerprint, "b" * 64)  # the same backbone behind another anchor


SEEN: dict[str, dict[str, torch.Tensor]] = {}
"""What the tower made of each `picture`, by chunk."""


def put(store: ChunkStore, record: CanonicalRecord) -> str:
    """A canonical, behind its encoding."""
    if record.vision:
        where = encoding_context(record.vision, record.context.tenant)
        store.put(EncodingRecord(record.chunk_id, where, record.tokens, SEEN[record.chunk_id]))
    return store.put(record)


def picture(seed: int, context: Context = CONTEXT, like: int | None = None) -> CanonicalRecord:
    """A chunk: text, three picture tokens, text. ``like`` another one, it differs from it a little."""
    tokens = torch.tensor([1, PICTURE, PICTURE, PICTURE, 2])
    embeds = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(seed if like is None else like))
    if like is not None:
        embeds = embeds + 0.02 * torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    SEEN[f"{seed:064x}"] = {"inputs_embeds": embeds}
    return canonical(
        f"{seed:064x}",
        context,
        tokens=5,
        input_ids=tokens,
        vision=VISION,
        embedding=picture_embedding(tokens, SEEN[f"{seed:064x}"], (PICTURE,)),
    )


def text(seed: int) -> CanonicalRecord:
    return canonical(f"{seed:064x}", tokens=3, info={})


def reference(records: Sequence[CanonicalRecord]) -> dict[str, np.ndarray]:
    """Chunk id -> unit mean of the picture tokens' features, in float64."""
    out = {}
    for record in records:
        if record.vision:
            mean = (
                SEEN[record.chunk_id]["inputs_embeds"][0, record.input_ids == PICTURE]
                .double()
                .mean(0)
                .numpy()
            )
            out[record.chunk_id] = mean / np.linalg.norm(mean)
    return out


def assert_as_reference(store: ChunkStore, records: Sequence[CanonicalRecord], context=CONTEXT) -> None:
    """The store ranks ``records`` for three queries as a scan of all of them does."""
    vectors = reference(records)
    for seed in range(3):
        query = np.random.default_rng(seed).standard_normal(WIDTH)
        cosines = {chunk: float(v @ query / np.linalg.norm(query)) for chunk, v in vectors.items()}
        hits = store.search(query, k=len(vectors) + 3, context=context)
        assert {hit.chunk_id for hit in hits} == cosines.keys()
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True)
        # rows are held in half precision
        assert scores == pytest.approx([cosines[hit.chunk_id] for hit in hits], abs=2e-3)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "store"


def filled(root: Path, count: int = 6) -> list[CanonicalRecord]:
    records = [picture(seed) for seed in range(count)]
    with ChunkStore.open(root) as store:
        for record in records:
            put(store, record)
    return records


# -- embeddings ------------------------------------------------------------------------------------


def test_an_embedding_is_the_unit_mean_of_picture_tokens():
    ids = torch.tensor([1, 9, 2, 10])
    features = torch.tensor([[[50.0, 50], [3, 0], [50, 50], [3, 8]]], dtype=torch.bfloat16)
    deep = {"deepstack_visual_embeds.0": torch.full((2, 2), 99.0)}
    found = mean_features(ids, {"inputs_embeds": features, **deep}, (9, 10))
    assert found.dtype == np.float32 and found.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("tokens", [(), (7,)])
def test_a_chunk_without_picture_tokens_has_no_embedding(tokens):
    assert mean_features(torch.tensor([1, 2]), {"inputs_embeds": torch.ones(1, 2, 4)}, tokens) is None


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_features_without_a_direction_make_no_embedding(value):
    embeds = {"inputs_embeds": torch.full((1, 2, 4), value)}
    assert mean_features(torch.tensor([9, 9]), embeds, (9,)) is None


def test_an_embedding_is_text_and_back():
    vector = np.linspace(-1, 1, 5, dtype=np.float32)
    assert unpack(pack(vector)).tolist() == pytest.approx(vector.tolist(), abs=1e-3)
    assert pack(None) == "" and unpack("") is None


@pytest.mark.parametrize("text", ["?", "AA==", "AH4=", "AHw=", "AAAA\n"])
def test_a_text_that_is_no_embedding_is_refused(text):
    with pytest.raises(ValueError):
        replace(picture(1), embedding=text)


def test_a_stored_picture_says_how_it_looks(tmp_path):
    """In its own header, whether its encoding is stored or not."""
    with ChunkStore.open(tmp_path) as store:
        first, second = picture(0), picture(1)
        put(store, first)
        store.put(second)
        for record, vector in zip((first, second), reference([first, second]).values(), strict=True):
            held = store.get_canonical(CONTEXT, record.chunk_id)
            assert unpack(held.embedding).tolist() == pytest.approx(vector.tolist(), abs=1e-3)
        assert_as_reference(store, [first, second])


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory", "disk"])
def test_a_stored_picture_finds_similar_ones_but_not_itself(url, tmp_path):
    with ChunkStore.open("memory://" if url == "memory" else tmp_path) as store:
        for record in [*(picture(seed) for seed in range(5)), picture(70, like=3), text(99)]:
            put(store, record)
        best, *others = store.search(f"{3:064x}", k=3, context=CONTEXT)
        assert best.chunk_id == f"{70:064x}" and best.score > 0.99 > others[0].score
        assert len(others) == 2 and f"{3:064x}" not in {hit.chunk_id for hit in others}
        assert_as_reference(store, [*(picture(seed) for seed in range(5)), picture(70, like=3)])


def test_what_is_archived_behind_another_anchor_is_no_hit(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        for record in (picture(1), picture(2, OTHER), picture(3, OTHER)):
            put(store, record)
        assert_as_reference(store, [picture(1)])
        assert_as_reference(store, [picture(2), picture(3)], OTHER)


def test_an_empty_store_has_no_hits(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        assert store.search([1.0, 0.0], context=CONTEXT) == []


# -- refusals --------------------------------------------------------------------------------------


def refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_wrong_questions_are_refused_by_name(tmp_path):
    records = filled(tmp_path, 2)
    with ChunkStore.open(tmp_path) as store:
        put(store, text(50))
        ask = store.search
        refused(lambda: ask("ab12", context=CONTEXT), UnknownChunk, "ab12.*window.search")
        refused(lambda: ask(f"{50:064x}", context=CONTEXT), UnknownChunk, "no picture")
        refused(lambda: ask(np.zeros(WIDTH), context=CONTEXT), ValueError, "no direction")
        refused(lambda: ask([1.0, float("nan")], context=CONTEXT), ValueError, "no direction")
        refused(lambda: ask(np.ones((2, 4)), context=CONTEXT), ValueError, r"\(2, 4\)")
        refused(lambda: ask(np.ones(3), context=CONTEXT), ValueError, "width 8")
        refused(lambda: ask({"a": 1}, context=CONTEXT), ValueError, "dict is no query")
        refused(lambda: ask(np.ones(WIDTH), 0, context=CONTEXT), ValueError, "k 0")
        foreign = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")
        refused(lambda: ask(np.ones(WIDTH), context=foreign), IncompatibleChunk, "acme")
        assert_as_reference(store, records)


def test_an_embedding_of_another_width_is_no_hit(tmp_path, caplog):
    records = filled(tmp_path, 2)
    with ChunkStore.open(tmp_path) as store:
        wide = picture(7)
        seen = {"inputs_embeds": torch.randn(1, 5, WIDTH + 1)}
        put(store, replace(wide, embedding=picture_embedding(wide.input_ids, seen, (PICTURE,))))
        assert_as_reference(store, records)
    assert "another width" in caplog.text


# -- growing, shrinking, lost ----------------------------------------------------------------------

_steps = st.lists(
    st.tuples(st.sampled_from(("put", "delete", "reopen", "elsewhere", "lose index")), st.integers(0, 5)),
    max_size=12,
)


@settings(max_examples=15)
@given(_steps)
def test_after_any_puts_deletes_and_reopens_search_equals_a_scan(steps):
    held: dict[int, CanonicalRecord] = {}
    with folder() as root:
        store, elsewhere = ChunkStore.open(root), ChunkStore.open(root)
        for step, seed in steps:
            where = elsewhere if step == "elsewhere" else store
            if step == "delete" or (step == "elsewhere" and seed in held):
                assert StoreAdmin(where).delete(picture(seed).key) == (held.pop(seed, None) is not None)
            elif step in ("put", "elsewhere"):
                held[seed] = picture(seed)
                put(where, held[seed])
            elif step == "reopen":
                store.close()
                store = ChunkStore.open(root)
            else:
                store.close()
                elsewhere.close()
                drop_index(root)
                store, elsewhere = ChunkStore.open(root), ChunkStore.open(root)
            assert_as_reference(store, list(held.values()))
        assert_as_reference(elsewhere, list(held.values()))
        store.close()
        elsewhere.close()


def test_an_object_that_leaves_by_another_way_is_no_hit_any_more(tmp_path):
    records = filled(tmp_path)
    with ChunkStore.open(tmp_path) as store:
        assert_as_reference(store, records)
        next(tmp_path.glob(f"objects/{records[2].key}.safetensors")).unlink()
        assert_as_reference(store, [*records[:2], *records[3:]])
        assert store.embedding(CONTEXT, records[2].chunk_id) is None


def test_a_memory_store_never_answers_with_what_it_let_go():
    records = [picture(seed) for seed in range(8)]
    pair = records[0].nbytes + replace(encoding(), embeds=SEEN[records[0].chunk_id]).nbytes
    with ChunkStore.open("memory://", memory_limit=3 * pair) as store:
        for record in records:
            put(store, record)
        assert_as_reference(store, records[-3:])


def bytes_below(root: Path) -> bytes:
    return b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())


def test_a_deleted_chunks_embedding_is_nowhere_on_the_disk(tmp_path):
    records = filled(tmp_path)
    with ChunkStore.open(tmp_path) as store:
        store.search(np.ones(WIDTH), context=CONTEXT)
        text = store.get_canonical(CONTEXT, records[1].chunk_id).embedding.encode()
        assert text in bytes_below(tmp_path)
        StoreAdmin(store).delete(records[1].key)
        assert text not in bytes_below(tmp_path)


def test_an_encrypted_store_searches_and_hides_embeddings(tmp_path):
    context = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")
    records = [picture(seed, context) for seed in range(4)]

    def kept(root: Path, **options) -> tuple[bytes, list[bytes]]:
        """All bytes of a store, and the embeddings it holds."""
        with ChunkStore.open(root, tenant="acme", **options) as store:
            for record in records:
                put(store, record)
            texts = [pack(store.embedding(context, record.chunk_id)).encode() for record in records]
        return bytes_below(root), texts

    whole, texts = kept(tmp_path / "plain")
    assert all(text in whole for text in texts)
    options = {"secret": "a secret that nobody guesses", "keys": [bytes(range(32))]}
    whole, texts = kept(tmp_path / "sealed", **options)
    assert not any(text in whole for text in texts)
    assert not any(record.chunk_id.encode() in whole for record in records)
    with ChunkStore.open(tmp_path / "sealed", tenant="acme", **options) as store:
        assert_as_reference(store, records, context)


def test_a_picture_whose_header_is_damaged_is_no_hit(tmp_path, caplog):
    records = filled(tmp_path)
    flip(file_of(tmp_path, records[1].key), 300)
    with ChunkStore.open(tmp_path) as store:
        assert_as_reference(store, [records[0], *records[2:]])
    assert "not searchable" in caplog.text


def test_search_with_a_remote_finds_objects_put_or_read_here(tmp_path):
    url = f"obstore+file://{tmp_path / 'remote'}"
    records = [picture(seed) for seed in range(4)]
    with ChunkStore.open(url) as there:
        for record in records:
            put(there, record)
        assert_as_reference(there, records)
    with ChunkStore.open(url) as here, ChunkStore.open(url, cache=tmp_path / "cache") as cached:
        for store in (here, cached):
            assert store.get_canonical(CONTEXT, records[0].chunk_id) is not None
            assert_as_reference(store, records[:1])
            assert store.get_canonical(CONTEXT, records[2].chunk_id) is not None
            assert_as_reference(store, [records[0], records[2]])


def test_patches_are_not_searched(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        store.put(patch())
        assert not list(store.search([1.0], context=CONTEXT))

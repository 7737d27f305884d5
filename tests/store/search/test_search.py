"""Search: the same answers as going through all objects, whatever happened to the rows it keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.store import (
    CanonicalRecord,
    ChunkStore,
    Context,
    EncodingRecord,
    StoreAdmin,
    encoding_context,
)
from kamera.store.search.embedding import pack, picture_embedding
from tests.store.builders import CONTEXT, VISION, canonical, drop_index

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


# -- refusals --------------------------------------------------------------------------------------


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

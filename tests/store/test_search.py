"""Search: the same answers as going through all objects, whatever happened to the index and its file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.store import CanonicalRecord, ChunkStore, Context, StoreAdmin, picture_embedding
from tests.store.builders import CONTEXT, canonical, drop_index

WIDTH = 8
PICTURE = 9  # the id of picture tokens here
OTHER = Context(CONTEXT.fingerprint, "b" * 64)  # the same backbone behind another anchor
ACME = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")

MEANS: dict[str, np.ndarray] = {}
"""The mean of the features of each `picture`, by chunk."""


def picture(seed: int, context: Context = CONTEXT, like: int | None = None) -> CanonicalRecord:
    """A chunk: text, three picture tokens, text. ``like`` another one, it differs from it a little."""
    tokens = torch.tensor([1, PICTURE, PICTURE, PICTURE, 2])
    embeds = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(seed if like is None else like))
    if like is not None:
        embeds = embeds + 0.02 * torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    MEANS[f"{seed:064x}"] = embeds[0, 1:4].double().mean(0).numpy()
    embedding = picture_embedding(tokens, {"inputs_embeds": embeds}, (PICTURE,))
    return canonical(f"{seed:064x}", context, tokens=5, input_ids=tokens, embedding=embedding)


def assert_as_reference(store: ChunkStore, records: Sequence[CanonicalRecord], context=CONTEXT) -> None:
    """The store ranks ``records`` for three queries as a scan of all of them does."""
    chunks = [record.chunk_id for record in records if record.embedding]
    vectors = np.array([store.embedding(context, chunk) for chunk in chunks]).reshape(-1, WIDTH)
    for vector, chunk in zip(vectors, chunks, strict=True):  # held in half precision
        assert vector == pytest.approx(MEANS[chunk] / np.linalg.norm(MEANS[chunk]), abs=1e-3)
    for seed in range(3):
        query = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
        cosines = vectors @ (query / np.linalg.norm(query))
        best = np.argsort(-cosines)
        for k in (2, len(chunks) or 1, len(chunks) + 3):
            hits = store.search(query, k=k, context=context)
            assert [hit.chunk_id for hit in hits] == [chunks[row] for row in best[:k]]
            assert [hit.score for hit in hits] == pytest.approx(list(cosines[best[:k]]), abs=1e-6)


def filled(root: Path, context: Context = CONTEXT, **options) -> list[CanonicalRecord]:
    """A store of six pictures that was searched, so that it has a file, unless it is encrypted."""
    records = [picture(seed, context) for seed in range(6)]
    with ChunkStore.open(root, tenant=context.tenant, **options) as store:
        store.put_many(records)
        store.search(np.ones(WIDTH), context=context)
    return records


def files_of(root: Path) -> list[Path]:
    """The files of the indices."""
    return sorted((root / "search").glob("*"))


@pytest.mark.parametrize("url", ["memory", "disk"])
def test_a_stored_picture_finds_similar_ones_but_not_itself(url, tmp_path):
    records = [*(picture(seed) for seed in range(5)), picture(70, like=3), canonical(f"{99:064x}", info={})]
    with ChunkStore.open("memory://" if url == "memory" else tmp_path) as store:
        store.put_many(records)
        best, *others = store.search(f"{3:064x}", k=3, context=CONTEXT)
        assert best.chunk_id == f"{70:064x}" and best.score > 0.99 > others[0].score
        assert len(others) == 2 and f"{3:064x}" not in {hit.chunk_id for hit in others}
        assert_as_reference(store, records)


def test_no_context_and_no_tenant_sees_the_pictures_of_another(tmp_path, caplog):
    held = {CONTEXT: [picture(1)], OTHER: [picture(2, OTHER), picture(3, OTHER)], ACME: [picture(4, ACME)]}

    def check() -> None:
        for context, records in held.items():
            with ChunkStore.open(tmp_path, tenant=context.tenant) as store:
                store.put_many(records)
                assert_as_reference(store, records, context)

    check()
    first, second, third = files_of(tmp_path)
    third.write_bytes(first.read_bytes())
    first.write_bytes(second.read_bytes())
    check()
    assert first.name in caplog.text and third.name in caplog.text


_steps = st.lists(
    st.tuples(st.sampled_from(("put", "delete", "reopen", "elsewhere", "lose index")), st.integers(0, 5)),
    max_size=12,
)


@settings(max_examples=15)
@given(_steps)
def test_after_any_puts_deletes_and_reopens_search_equals_a_scan(steps):
    held: dict[int, CanonicalRecord] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "store"
        store, elsewhere = ChunkStore.open(root), ChunkStore.open(root)
        for step, seed in steps:
            where = elsewhere if step == "elsewhere" else store
            if step == "delete" or (step == "elsewhere" and seed in held):
                assert StoreAdmin(where).delete(picture(seed).key) == (held.pop(seed, None) is not None)
            elif step in ("put", "elsewhere"):
                held[seed] = picture(seed)
                where.put(held[seed])
            else:
                store.close()
                if step == "lose index":
                    elsewhere.close()
                    drop_index(root)
                    elsewhere = ChunkStore.open(root)
                store = ChunkStore.open(root)
            assert_as_reference(store, list(held.values()))
        assert_as_reference(elsewhere, list(held.values()))
        store.close()
        elsewhere.close()


@pytest.mark.parametrize("damage", ["cut", "flipped", "a link"])
def test_a_file_that_cannot_be_trusted_is_named_and_made_anew(damage, tmp_path, caplog):
    root = tmp_path / "store"
    records = filled(root)
    [file] = files_of(root)
    data = file.read_bytes()
    if damage == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(data[:-1] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with ChunkStore.open(root) as store:
        assert_as_reference(store, records)
        assert file.name in caplog.text
        file.write_bytes(b"damaged again")
        StoreAdmin(store).verify()
    assert file.read_bytes() == data


def test_among_many_a_graph_finds_nearly_all(tmp_path, monkeypatch):
    monkeypatch.setattr("kamera.store.search.FLAT_MOST", 100)
    records = [picture(seed) for seed in range(130)]
    with ChunkStore.open(tmp_path) as store:
        store.put_many(records[:120])
        StoreAdmin(store).verify()
    with ChunkStore.open(tmp_path) as store:
        store.put_many(records[120:])
        for record in records[:10]:
            StoreAdmin(store).delete(record.key)
        left = {record.chunk_id: store.embedding(CONTEXT, record.chunk_id) for record in records[10:]}
        for seed in range(20):
            query = np.random.default_rng(seed).standard_normal(WIDTH)
            best = sorted(left, key=lambda chunk: -left[chunk] @ query)[:5]
            assert len({hit.chunk_id for hit in store.search(query, k=5, context=CONTEXT)} & set(best)) >= 4
    assert b"IHNf" in files_of(tmp_path)[0].read_bytes()  # what faiss calls the graph


def bytes_below(root: Path) -> bytes:
    return b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())


def test_a_deleted_chunks_embedding_is_nowhere_on_the_disk(tmp_path):
    record, *others = filled(tmp_path)
    with ChunkStore.open(tmp_path) as elsewhere, ChunkStore.open(tmp_path) as store:
        elsewhere.search(np.ones(WIDTH), context=CONTEXT)
        forms = [record.embedding.encode(), store.embedding(CONTEXT, record.chunk_id).tobytes()]
        assert all(form in bytes_below(tmp_path) for form in forms)
        StoreAdmin(store).delete(record.key)
        assert not any(form in bytes_below(tmp_path) for form in forms)
        assert_as_reference(store, others)
        elsewhere.put(picture(20))
    assert files_of(tmp_path) and not any(form in bytes_below(tmp_path) for form in forms)


def test_an_encrypted_store_searches_and_hides_embeddings(tmp_path):
    options = {"secret": "a secret that nobody guesses", "keys": [bytes(range(32))]}
    records = filled(tmp_path / "plain", ACME)
    assert all(record.embedding.encode() in bytes_below(tmp_path / "plain") for record in records)
    filled(tmp_path / "sealed", ACME, **options)
    whole = bytes_below(tmp_path / "sealed")
    with ChunkStore.open(tmp_path / "sealed", tenant="acme", **options) as store:
        assert_as_reference(store, records, ACME)
        for record in records:
            vector = store.embedding(ACME, record.chunk_id).tobytes()
            assert not any(
                text in whole for text in (record.embedding.encode(), vector, record.chunk_id.encode())
            )

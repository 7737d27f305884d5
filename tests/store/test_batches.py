"""Many objects at once: the same as one by one, and side by side where each waits for a remote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import IncompatibleChunk
from kamera.store import ChunkStore, ObjectInfo
from kamera.store.remote import RemoteTier
from tests.store.builders import (
    CONTEXT,
    VISION,
    assert_same,
    canonical,
    encoding,
    patch,
)

CHUNKS = [f"{n:064x}" for n in range(5)]
RECORDS = [canonical(chunk, seed=n) for n, chunk in enumerate(CHUNKS)]


@pytest.fixture(params=["directory", "memory", "remote"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    remote = f"obstore+{(tmp_path / 'far').as_uri()}"
    return {"directory": str(tmp_path / "store"), "memory": "memory://", "remote": remote}[request.param]


SEALED = {"tenant": "acme", "secret": b"s" * 32, "keys": [b"k" * 32]}
ACME = replace(CONTEXT, tenant="acme")


@pytest.fixture(params=["memory", "directory", "sealed", "obstore", "redis", "s3", "cache"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ChunkStore]:
    """Opens one store, of each kind."""
    kind, far = request.param, f"obstore+{(tmp_path / 'far').as_uri()}"
    if kind in ("redis", "s3"):
        far = str(request.getfixturevalue("server" if kind == "redis" else "s3").url("timeout=60"))
    url = {"memory": "memory://", "directory": tmp_path / "store", "sealed": tmp_path / "store"}.get(
        kind, far
    )
    more: dict[str, Any] = {"sealed": SEALED, "cache": {"cache": tmp_path / "cache"}}.get(kind, {})
    return lambda: ChunkStore.open(url, **more)


def test_put_together_they_are_what_they_are_put_one_by_one(opened: Callable[[], ChunkStore]) -> None:
    with opened() as store:
        context = ACME if store.tenant else CONTEXT
        chunks = [canonical(chunk, context, seed=n, vision=VISION) for n, chunk in enumerate(CHUNKS)]
        encodings = [encoding(chunk, tenant=store.tenant, seed=n) for n, chunk in enumerate(CHUNKS)]
        patches = [patch(chunk, context, rank=2, seed=n) for n, chunk in enumerate(CHUNKS)]
        store.put_many([patch(CHUNKS[0], context, rank=1), patch(CHUNKS[1], context, rank=3)])
        weaker = patch(CHUNKS[1], context, rank=1, formed="near")
        puts = store.put_many([*patches, *chunks, *encodings, canonical(CHUNKS[0], context, seed=9), weaker])
        assert [put.error for put in puts] == [None] * len(puts)
        assert puts[0].key != puts[1].key and store.put_many([]) == []

        def check(store: ChunkStore) -> None:
            for made, encoded, fixed in zip(chunks, encodings, patches, strict=True):
                assert_same(store.get_canonical(context, made.chunk_id), made)
                assert_same(store.get_encoding(VISION, made.chunk_id), encoded)
                assert_same(store.get_patch(context, made.chunk_id, ("x", "y")), fixed)
            assert {info.key for info in store.ls()} == {put.key for put in puts}

        check(store)
        assert not store.flush(300).unsaved
        if store.url == "memory://":
            return
    with opened() as again:
        check(again)


def test_one_refused_record_loses_no_other_anywhere(opened: Callable[[], ChunkStore]) -> None:
    with opened() as store:
        context = ACME if store.tenant else CONTEXT
        foreign = canonical(context=replace(CONTEXT, tenant="another"))
        bad = encoding(CHUNKS[2], tenant="another")
        named = canonical(CHUNKS[0], context, vision=VISION)
        puts = store.put_many([named, foreign, bad, encoding(CHUNKS[0], tenant=store.tenant)])
        assert [type(put.error) for put in puts] == [
            type(None),
            IncompatibleChunk,
            IncompatibleChunk,
            type(None),
        ]
        with pytest.raises(IncompatibleChunk, match="another"):
            store.put(foreign)
        assert len(store.ls()) == 2


def test_puts_to_a_remote_overlap_but_none_goes_before_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = threading.Barrier(len(CHUNKS), timeout=300)
    sent: list[str] = []
    real = RemoteTier.put

    def put(self: RemoteTier, info: ObjectInfo, data: bytes) -> bool:
        everyone.wait()
        sent.append(info.key)
        return real(self, info, data)

    monkeypatch.setattr(RemoteTier, "put", put)
    encodings = [encoding(chunk) for chunk in CHUNKS]
    chunks = [canonical(chunk, vision=VISION) for chunk in CHUNKS]
    with ChunkStore.open(f"obstore+{(tmp_path / 'far').as_uri()}") as store:
        assert not any(put.error for put in store.put_many([*chunks, *encodings]))
    assert set(sent[: len(CHUNKS)]) == {made.key for made in encodings}
    assert set(sent[len(CHUNKS) :]) == {made.key for made in chunks}

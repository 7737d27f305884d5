"""What a store asks a remote for: fronts of what is new, nothing of what it knows, many in one question."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kamera.errors import UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.remote.listing import Listing
from kamera.store.remote.tier import RemoteTier
from kamera.store.search.embedding import picture_embedding
from lab.reliability.redis_server import RedisServer
from lab.reliability.s3_server import S3Server
from tests.store.builders import CONTEXT, VISION, canonical, encoding, patch


def remote_of(store: ChunkStore) -> RemoteTier:
    assert store._tiers.remote is not None
    return store._tiers.remote


def test_a_listing_rereads_only_changes(
    two: tuple[ChunkStore, ChunkStore],
) -> None:
    one, other = two
    for name in "abc":
        one.put(canonical(name * 64))
    one.put(patch(rank=1))
    first = other.ls()
    assert other.ls() == first == one.ls()
    one.put(patch(rank=3, seed=5))  # of the same name
    StoreAdmin(one).delete(canonical("a" * 64).key)
    one.put(canonical("d" * 64))
    with ChunkStore.open(one.url) as fresh:
        assert other.ls() == fresh.ls() != first
    assert [info.rank for info in other.ls("exact")] == [3]


def test_what_is_remembered_is_what_reading_all_headers_gives(two: tuple[ChunkStore, ChunkStore]) -> None:
    one, other = two
    rng = random.Random(3)
    for step in range(40):
        chunk = rng.choice("abcd") * 64
        action = rng.randrange(4)
        if action == 0:
            one.put(canonical(chunk, tokens=rng.randrange(1, 5)))
        elif action < 3:
            one.put(patch(chunk, rank=rng.randrange(1, 4), seed=step, formed=str(step)))
        else:
            StoreAdmin(one).delete(rng.choice([canonical(chunk).key, patch(chunk).key]))
        remote = remote_of(other)
        assert list(remote.listing.infos()) == list(remote.listing.infos(afresh=True)), step


def test_an_unchanged_listing_reads_no_blob(s3: S3Server) -> None:
    with ChunkStore.open(s3.url()) as store:
        for i in range(20):
            store.put(canonical(f"{i:064x}"))
    with ChunkStore.open(s3.url()) as store:
        s3.requests.clear()
        assert len(store.ls()) == 20
        assert sum(s3.requests.values()) == 1 + 20
        s3.requests.clear()
        assert len(store.ls()) == 20
        assert s3.requests == {"GET": 1}


def test_a_listing_asks_redis_for_little_of_what_it_knows(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60")) as store:
        for i in range(40):
            store.put(canonical(f"{i:064x}", info={"title": "x" * 3000}))

        def sent() -> int:
            before = int(server.client().info("stats")["total_net_output_bytes"])
            assert len(store.ls()) == 40
            return int(server.client().info("stats")["total_net_output_bytes"]) - before

        first, second = sent(), sent()
        assert first > 40 * 3000 and second < first / 5


def test_what_is_remembered_of_a_listing_is_bounded(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60")) as store:
        for i in range(6):
            store.put(canonical(f"{i:064x}"))
        remote = remote_of(store)
        small = Listing(remote._blobs, remote._codec, "", bound=4)
        for _ in range(2):
            assert sorted(info.key for info in small.infos()) == sorted(info.key for info in store.ls())
            assert len(small._entries) == 4
        StoreAdmin(store).gc(0)
        assert list(small.infos()) == [] and not small._entries


def test_a_search_looks_at_memory_and_asks_no_remote(server: RedisServer) -> None:
    encodings, embedded = zip(*map(pictured, range(12)), strict=True)
    with ChunkStore.open(server.url("timeout=60")) as store:
        for record in (*encodings, *embedded):
            store.put(record)
        calls = remote_of(store).stats().calls
        for k in (1, 10):
            assert len(store.search(embedded[0].chunk_id, k=k, context=CONTEXT)) == k
        assert remote_of(store).stats().calls == calls
    store = ChunkStore.open(server.url("timeout=60"), memory_limit=0)
    with store, pytest.raises(UnknownChunk, match="no embedding"):
        store.search(embedded[0].chunk_id, k=1, context=CONTEXT)


def pictured(i: int) -> Any:
    import torch

    width = 6
    embeds = torch.nn.functional.one_hot(torch.tensor([i % width, (i * 5 + 1) % width, 2]), width).float()
    seen = replace(encoding(f"{i:064x}"), embeds={"inputs_embeds": embeds + 0.01 * i})
    ids = torch.tensor([7, 7, 7])
    looks = picture_embedding(ids, {"inputs_embeds": embeds[None] + 0.01 * i}, (7,))
    return seen, canonical(f"{i:064x}", input_ids=ids, vision=VISION, embedding=looks)

"""What a store asks a remote for: fronts of what is new, nothing of what it knows, many in one question."""

from __future__ import annotations

import random

from kamera.store import ChunkStore, StoreAdmin
from kamera.store.remote.tier import RemoteTier
from tests.store.builders import canonical, patch


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

"""The store benchmark fills stores as puts do, finds what it looks for, and reads whole files."""

from __future__ import annotations

import math
import os

import pytest
import torch

from kamera import ChunkStore
from kamera.store import StoreAdmin
from lab.speed.lookups import CONTEXT, antecedents, chunk_id, fill, lookups
from lab.speed.lookups import records as made
from lab.speed.store import goals, run
from lab.speed.tiers import CACHED, COLD, THEN, Reader, can_cool, cool, digests, read
from lab.speed.timing import Spread
from tests.lab.speed.beds import SMALL, TOKENS, deck


@pytest.fixture(scope="module")
def found():
    return {section.title: section.rows for section in run(SMALL).sections}


def test_a_store_filled_in_bulk_is_one_that_puts_made(tmp_path):
    fill(tmp_path / "bulk", 0, 25)
    with ChunkStore.open(tmp_path / "put") as store:
        for number in range(25):
            canonical, *patch = made(number)
            store.put(canonical)
            for record in patch:
                store.put(record)
        expected = [(i.key, i.kind, i.tokens) for i in store.ls()]
    with ChunkStore.open(tmp_path / "bulk") as store:
        assert sorted((i.key, i.kind, i.tokens) for i in store.ls()) == sorted(expected)
        report = StoreAdmin(store).verify()
        assert (report.ok, report.quarantined, report.refused) == (len(expected), (), ())
        assert store.get_patch(CONTEXT, chunk_id(20), antecedents(20)) is not None


def test_look_ups_go_to_what_is_there(tmp_path):
    fill(tmp_path / "store", 0, 12)
    rows = lookups(tmp_path / "store", 12, 50)
    assert len(rows) == 6
    assert all(0.0 < row["p50 ms"] <= row["p99 ms"] < math.inf for row in rows)
    with pytest.raises(AssertionError):
        lookups(tmp_path / "store", 2000, 50)


@pytest.mark.slow
def test_every_store_and_every_tier_has_its_rows(found):
    assert [r["chunks"] for r in found["Look-ups"]] == [30] * 6 + [60] * 6
    applied = [f"{tier}{THEN}" for tier in (CACHED, COLD)]
    wanted = {
        "get: memory",
        "get: page cache",
        "read()",
        "recall: memory",
        "recall: page cache",
        applied[0],
    }
    if can_cool():
        wanted |= {"get: cold", "dd", "dd, direct", "recall: cold", applied[1]}
    for digest in digests():
        tiers = {r["what"]: r for r in found["One chunk from each tier"] if r["digest"] == digest}
        assert set(tiers) == wanted
        assert {r["tokens"] for r in tiers.values()} == {TOKENS}
        assert len({r["MB"] for r in tiers.values()}) == 1
        for what in ("recall: page cache", "get: page cache"):  # by how much is for a quiet machine
            assert 0.0 < tiers[what]["times memory"].median < math.inf


def test_goals_use_the_largest_store_and_the_longest_chunk():
    ratio, share = Spread(1.4, 1.3, 1.6), Spread(0.5, 0.4, 0.6)
    looked = [
        {"chunks": 10, "look-up": "has", "p99 ms": 5.0},
        {"chunks": 99, "look-up": "has", "p99 ms": 0.5},
        {"chunks": 99, "look-up": "get", "p99 ms": 0.9},
    ]
    shorter, longer = ({"tokens": n, "digest": "sha256"} for n in (8, 64))
    tiers = [
        {**shorter, "what": "recall: page cache", "times memory": Spread(9.0, 9.0, 9.0)},
        {**longer, "what": "recall: page cache", "times memory": ratio},
        {**longer, "what": "get: page cache", "times memory": Spread(9.0, 9.0, 9.0)},
        {**longer, "what": "get: cold", "share of dd": share},
    ]
    told = [(g["is"], g["met"]) for g in goals(looked, tiers, stored=99, tokens=64)]
    assert told == [(0.9, True), (ratio, True), (share, False)]


@pytest.mark.parametrize("tier", [CACHED, COLD])
def test_a_reader_fills_its_slot_from_the_disk_as_from_memory(tmp_path, tier):
    here = deck(1).stock
    with ChunkStore.open(tmp_path, memory_limit=0) as store:
        stock = here.on(store)
        chunk_id = stock.chunk(0).id
        if tier == COLD and can_cool():
            cool(tmp_path.rglob("*.safetensors"))
        written = []
        for reader in (Reader(here.store, here, chunk_id), Reader(store, stock, chunk_id)):
            for layer in reader.slot:
                for tensor in layer.values():
                    tensor.fill_(7.0)
            reader.whole()
            written.append([t.clone() for layer in reader.slot for t in layer.values()])
        assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))
        assert not any(bool((t == 7.0).all()) for t in written[0])


@pytest.mark.parametrize("direct", [False, True])
def test_dd_reads_the_whole_file_cold_or_not(tmp_path, direct):
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no O_DIRECT here")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * (1 << 20) + 12_345))
    cool([path])
    try:
        assert read(path, direct=direct) == path.stat().st_size
    except OSError:
        pytest.skip("this file system has no direct reads")

"""A remote that dies, hangs, fills up or lies; ``--size`` is the number of operations, over all of these.

A real redis-server is behind the store. Between random puts and gets it is killed and started, stopped
and continued, left without memory, or its values are changed behind the store's back: a bit flipped, cut
short, lengthened, swapped with another object's, replaced by an older version, deleted, or of another type.
Whatever is served must be the object that was asked for, whole, in a version that was put; and when the
remote works again, it must have everything that was acknowledged.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.errors import CorruptChunk
from kamera.store import ChunkStore
from tests.servers.redis_server import RedisServer

SLOTS = 24
_TROUBLE = 0.05  # the share of operations before which something happens
_LAST_SECONDS = 600.0  # for the remote to get what waits, once it works again

# it keeps what it confirmed through a SIGKILL
_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
_QUICK = "timeout=0.05&retries=0&cooldown=0.05"


def run(size: int, seed: int) -> dict[str, Any]:
    """Run ``size`` operations, an equal share against each kind of trouble."""
    cases: dict[str, Callable[[int, random.Random], Counter[str]]] = {
        "dead, no cache": lambda n, rng: _outages(n, rng, _kill, cached=False),
        "dead, cache": lambda n, rng: _outages(n, rng, _kill, cached=True),
        "hanging, no cache": lambda n, rng: _outages(n, rng, _hang, cached=False),
        "hanging, cache": lambda n, rng: _outages(n, rng, _hang, cached=True),
        "full, no cache": lambda n, rng: _outages(n, rng, _fill, cached=False),
        "lying": _lies,
    }
    found = {
        name: _figures(case(max(1, size // len(cases)), random.Random(f"{seed} {name}")))
        for name, case in cases.items()
    }
    return {
        "wrong": sum(f["wrong"] for f in found.values()),
        "lost": sum(f["lost"] for f in found.values()),
    } | found


def _figures(tally: Counter[str]) -> dict[str, int]:
    names = ("operations", "troubles", "puts", "served", "misses", "refused", "wrong", "lost")
    return {name: tally[name] for name in names}


def _outages(
    operations: int, rng: random.Random, trouble: Callable[[RedisServer, bool], None], *, cached: bool
) -> Counter[str]:
    """Operations while the server comes and goes."""
    tally: Counter[str] = Counter(operations=operations)
    latest: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, RedisServer(*_DURABLE) as server:
        cache = Path(folder) / "cache" if cached else None
        broken = False
        with ChunkStore.open(
            server.url(_QUICK), memory_limit="256KiB" if cached else "64MiB", cache=cache
        ) as store:
            for version in range(1, operations + 1):
                if rng.random() < _TROUBLE:
                    broken = not broken
                    trouble(server, broken)
                    tally["troubles"] += 1
                slot = rng.randrange(SLOTS)
                if rng.random() < 0.3:
                    _put(store, slot, version, latest, tally)
                else:
                    got = _get(store, slot, tally)
                    tally["wrong"] += got not in (None, latest.get(slot))
                    # on the disk it is at hand whatever the remote does
                    tally["lost"] += cached and got is None and slot in latest
            if broken:
                trouble(server, False)
            report = store.flush(_LAST_SECONDS)
            tally["lost"] += len(report.unsaved) + len(report.dropped)
        with ChunkStore.open(server.url("timeout=60")) as store:
            for slot, version in latest.items():
                tally["lost"] += _get(store, slot, Counter()) != version
    return tally


def _lies(operations: int, rng: random.Random) -> Counter[str]:
    """Operations on a server whose values change between them."""
    tally: Counter[str] = Counter(operations=operations)
    latest: dict[int, int] = {}
    versions: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}
    history: dict[Any, list[Any]] = {}
    with RedisServer() as server:
        client = server.client()
        with ChunkStore.open(server.url("timeout=60"), memory_limit=0) as store:
            for version in range(1, operations + 1):
                slot = rng.randrange(SLOTS)
                keys: list[Any] = sorted(key for key in client.keys("*") if b"/objects/" in key)
                if keys and rng.random() < 0.5:
                    _lie(client, rng, keys, history)
                    tally["troubles"] += 1
                if rng.random() < 0.4:
                    _put(store, slot, version, latest, tally)
                    versions[slot].add(version)
                    for key in client.keys("*/objects/*"):
                        if client.type(key) == b"string":
                            history.setdefault(key, []).append(client.get(key))
                            del history[key][:-4]
                else:
                    got = _get(store, slot, tally)
                    tally["wrong"] += got is not None and got not in versions[slot]
    return tally


def _lie(client: Any, rng: random.Random, keys: list[bytes], history: dict[Any, list[Any]]) -> None:
    key = rng.choice(keys)
    if client.type(key) != b"string":
        client.delete(key)
        return
    data = bytearray(client.get(key))
    place = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(8)
    if kind == 0 and data:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data += os.urandom(rng.randrange(1, 9))
    elif kind == 3 and data:
        data[place : place + 64] = os.urandom(64)
    elif kind == 4:
        other = rng.choice(keys)
        data = bytearray(client.get(other) if client.type(other) == b"string" else b"")
    elif kind == 5 and history.get(key):
        data = bytearray(rng.choice(history[key]))
    elif kind == 6:
        client.delete(key)
        return
    else:
        client.delete(key)
        client.rpush(key, bytes(data))
        return
    client.set(key, bytes(data))


def _put(store: ChunkStore, slot: int, version: int, latest: dict[int, int], tally: Counter[str]) -> None:
    rig.put(store, slot, version)
    if rig.is_patch(slot) or slot not in latest:
        latest[slot] = version  # a canonical that is there stays; one that was refused is put again
    tally["puts"] += 1


def _get(store: ChunkStore, slot: int, tally: Counter[str]) -> int | None:
    """The version served; None for a miss, -1 for parts of several."""
    try:
        if rig.is_patch(slot):
            found: rig.Record | None = store.get_patch(rig.CONTEXT, rig.chunk(slot), ())
        else:
            found = store.get_canonical(rig.CONTEXT, rig.chunk(slot))
    except CorruptChunk:
        tally["refused"] += 1
        return None
    if found is None:
        tally["misses"] += 1
        return None
    tally["served"] += 1
    return rig.version_of(found) if found.chunk_id == rig.chunk(slot) else -1


def _kill(server: RedisServer, broken: bool) -> None:
    server.kill() if broken else server.start()


def _hang(server: RedisServer, broken: bool) -> None:
    server.pause() if broken else server.resume()


def _fill(server: RedisServer, broken: bool) -> None:
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb" if broken else "0")

"""A remote that dies, hangs, fills up or lies; ``size`` is the number of operations, over all of these.

A real server (Redis or Valkey, where there is one) or an object store's library on real files is behind the
store. Between random puts and gets the server is killed and started, stopped and continued, left without
memory; the files are out of reach for a while; or values are changed behind the store's back: a bit flipped,
cut short, lengthened, swapped with another object's, replaced by an older version, deleted, or of another
type. Whatever is served must be the object that was asked for, whole, in a version that was put; and when the
remote works again, it must have everything that was acknowledged.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from benchmarks.reliability.redis_server import BINARY, RedisServer
from kamera.errors import CorruptChunk
from kamera.store import ChunkStore

SIZE: int = 4000
SLOTS = 24
FIGURES = ("operations", "troubles", "puts", "answered", "misses", "refused", "wrong", "lost")
_TROUBLE = 0.05  # the share of operations before which something happens
_LAST_SECONDS = 600.0  # for the remote to get what waits, once it works again

# it keeps what it confirmed through a SIGKILL
_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
_QUICK = "timeout=0.05&retries=0&cooldown=0.05"


def run(size: int, seed: int) -> dict[str, Any]:
    """Run ``size`` operations, an equal share against each kind of trouble; figures of each, and of all."""
    cases: dict[str, Callable[[int, random.Random], Counter[str]]] = {
        "files that lie": _lying_files,
        "files out of reach": _files_out_of_reach,
    }
    if BINARY is not None:
        cases |= {
            "dead, no cache": lambda n, rng: _outages(n, rng, _kill, cached=False),
            "dead, cache": lambda n, rng: _outages(n, rng, _kill, cached=True),
            "hanging, no cache": lambda n, rng: _outages(n, rng, _hang, cached=False),
            "hanging, cache": lambda n, rng: _outages(n, rng, _hang, cached=True),
            "full, no cache": lambda n, rng: _outages(n, rng, _fill, cached=False),
            "lying": _lying_server,
        }
    found: dict[str, Counter[str]] = {}
    for name, case in cases.items():
        found[name] = case(max(1, size // len(cases)), random.Random(f"{seed} {name}"))
    total = {what: sum(tally[what] for tally in found.values()) for what in FIGURES}
    shares = {f"operations, {name}": tally["operations"] for name, tally in found.items()}
    return total | shares | {"cases": found}


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
                slot, got = _operate(store, version, rng, latest, tally)
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


def _lying_server(operations: int, rng: random.Random) -> Counter[str]:
    with RedisServer() as server:
        client: Any = server.client()

        def names() -> list[str]:
            return sorted(key.decode() for key in client.keys("*/objects/*"))

        def read(name: str) -> bytes | None:
            return client.get(name) if client.type(name) == b"string" else None

        def write(name: str, data: bytes | None) -> None:
            client.delete(name)
            if data is None:
                client.rpush(name, b"of another type")
            else:
                client.set(name, data)

        return _lies(server.url("timeout=60"), operations, rng, (names, read, write, client.delete))


def _lying_files(operations: int, rng: random.Random) -> Counter[str]:
    with tempfile.TemporaryDirectory() as place:

        def names() -> list[str]:
            return sorted(str(path) for path in Path(place).glob("**/objects/*"))

        def read(name: str) -> bytes | None:
            return Path(name).read_bytes() if Path(name).is_file() else None

        def delete(name: str) -> None:
            shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)

        def write(name: str, data: bytes | None) -> None:
            delete(name)
            if data is None:
                delete(name)  # a folder would be no key of an object store
            else:
                Path(name).write_bytes(data)

        return _lies(f"obstore+file://{place}", operations, rng, (names, read, write, delete))


def _files_out_of_reach(operations: int, rng: random.Random) -> Counter[str]:
    """Operations while the folder of an object store is exchanged for a file, and comes back."""
    tally: Counter[str] = Counter(operations=operations)
    latest: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, away = Path(place) / "remote", Path(place) / "away"
        url, broken = f"obstore+file://{folder}", False

        def trouble() -> None:
            if broken:
                folder.rename(away)
                folder.write_bytes(b"")
            else:
                folder.unlink()
                away.rename(folder)

        with ChunkStore.open(f"{url}?{_QUICK}", memory_limit="64MiB") as store:
            for version in range(1, operations + 1):
                if rng.random() < _TROUBLE:
                    broken = not broken
                    trouble()
                    tally["troubles"] += 1
                _operate(store, version, rng, latest, tally)
            if broken:
                broken = False
                trouble()
            report = store.flush(_LAST_SECONDS)
            tally["lost"] += len(report.unsaved) + len(report.dropped)
        with ChunkStore.open(url) as store:
            for slot, version in latest.items():
                tally["lost"] += _get(store, slot, Counter()) != version
    return tally


Access = tuple[
    Callable[[], list[str]],
    Callable[[str], bytes | None],
    Callable[[str, bytes | None], object],
    Callable[[str], object],
]
"""Names of the stored blobs; read one, write it (None: one of another type), delete it."""


def _lies(url: str, operations: int, rng: random.Random, access: Access) -> Counter[str]:
    """Operations on a remote whose values change between them."""
    names, read, *_ = access
    tally: Counter[str] = Counter(operations=operations)
    latest: dict[int, int] = {}
    versions: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}
    history: dict[str, list[bytes]] = {}
    with ChunkStore.open(url, memory_limit=0) as store:
        for version in range(1, operations + 1):
            slot, held = rng.randrange(SLOTS), names()
            if held and rng.random() < 0.5:
                _lie(rng, held, history, access)
                tally["troubles"] += 1
            if rng.random() < 0.4:
                _put(store, slot, version, latest, tally)
                versions[slot].add(version)
                for name in names():
                    if (data := read(name)) is not None:
                        history.setdefault(name, []).append(data)
                        del history[name][:-4]
            else:
                got = _get(store, slot, tally)
                tally["wrong"] += got is not None and got not in versions[slot]
    return tally


def _lie(rng: random.Random, held: list[str], history: dict[str, list[bytes]], access: Access) -> None:
    _, read, write, delete = access
    name = rng.choice(held)
    found = read(name)
    if found is None:
        delete(name)
        return
    data = bytearray(found)
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
        data = bytearray(read(rng.choice(held)) or b"")
    elif kind == 5 and history.get(name):
        data = bytearray(rng.choice(history[name]))
    elif kind == 6:
        delete(name)
        return
    else:
        write(name, None)
        return
    write(name, bytes(data))


def _operate(
    store: ChunkStore, version: int, rng: random.Random, latest: dict[int, int], tally: Counter[str]
) -> tuple[int, int | None]:
    """A put or a get of some slot; it, and what was got."""
    slot = rng.randrange(SLOTS)
    if rng.random() < 0.3:
        _put(store, slot, version, latest, tally)
        return slot, latest[slot]
    got = _get(store, slot, tally)
    tally["wrong"] += got not in (None, latest.get(slot))
    return slot, got


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
    tally["answered"] += 1
    return rig.version_of(found) if found.chunk_id == rig.chunk(slot) else -1


def _kill(server: RedisServer, broken: bool) -> None:
    server.kill() if broken else server.start()


def _hang(server: RedisServer, broken: bool) -> None:
    server.pause() if broken else server.resume()


def _fill(server: RedisServer, broken: bool) -> None:
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb" if broken else "0")

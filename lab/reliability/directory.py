"""A directory store at size: what opening, look-ups, forgetting, collecting, verifying and a rebuild cost.

``size`` counts objects: canonicals of one token, every tenth with a patch. Their files are written in
bulk by the store's own codec, without fsync, and the index is made from them. Nothing here decides on a
threshold.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kamera.ops import LowRank, Patch, kv_of
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord, StoreAdmin
from kamera.store.codec import Codec

SIZE = 50_000

_FORK = multiprocessing.get_context("fork")  # the others import torch once more, for seconds
_CONTEXT = Context("f" * 64, "a" * 64)
_LOOKUPS = 2_000
_BULK = 64  # objects of the store that is verified for its bytes
_BULK_TOKENS = 4096
_LOCKED_SECONDS = 3.0


def run(size: int, seed: int) -> dict[str, Any]:
    """The figures, in the order in which they were taken."""
    folder = Path(tempfile.mkdtemp(prefix="kamera-directory-"))
    root = folder / "store"
    draw = random.Random(seed)
    figures: dict[str, Any] = {}
    try:
        with ChunkStore.open(root, memory_limit=0) as store:
            store.put(next(_records(0)))
        for number in range(size * 10 // 11):
            for record in _records(number):
                _write(root, record)
        count = size * 10 // 11
        figures["rebuild"] = _rebuilt(root)
        figures["open ms"] = round(1e3 * min(_in_child(root, _open) for _ in range(3)), 3)
        figures["first listing s"] = round(_in_child(root, _listing), 3)
        figures["look-ups"] = _look_ups(root, count, draw)
        figures["while another process holds the index"] = _locked(root, count, draw)
        with ChunkStore.open(root, memory_limit=0) as store:
            figures["objects"] = StoreAdmin(store).stats().objects
            figures["forget s"] = round(_seconds(lambda: StoreAdmin(store).forget(_chunk(count // 2))), 3)
            keep = StoreAdmin(store).stats().bytes * 4 // 5
            figures["gc of a fifth s"] = round(_seconds(lambda: StoreAdmin(store).gc(keep)), 3)
            figures["verify s"] = round(_seconds(StoreAdmin(store).verify), 3)
            figures["close ms"] = round(1e3 * _seconds(store.close), 3)
        figures["SQLite files"] = sorted(str(path.relative_to(root)) for path in root.rglob("*.sqlite"))
        figures["verify of large objects"] = _bulk(folder / "bulk")
        return figures
    finally:
        shutil.rmtree(folder)


def _chunk(number: int) -> str:
    return f"{number:064x}"


def _records(number: int) -> Iterator[CanonicalRecord | PatchRecord]:
    one = torch.full((1, 1, 4), number % 128, dtype=torch.int8)
    ids = torch.tensor([number])
    places = torch.zeros(1, 1, dtype=torch.int64)
    yield CanonicalRecord(_chunk(number), _CONTEXT, ids, places, kv_of([{"k": one}]))
    if number % 10 == 0:
        factors = LowRank(torch.ones(1, 1), torch.ones(4, 1))
        before = (_chunk(number + 1), _chunk(number + 2))
        yield PatchRecord(_chunk(number), _CONTEXT, before, "exact", Patch.of([{"k": factors}]), "exact")


def _write(root: Path, record: CanonicalRecord | PatchRecord) -> None:
    codec = Codec()
    path = _path(root, codec.name(record.key))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(codec.encode(record, 1e9))


def _path(root: Path, name: str) -> Path:
    return root / "objects" / f"{name}.safetensors"


def _rebuilt(root: Path) -> dict[str, float]:
    """How long a rebuild takes, and how long others wait for a put, a look-up and a listing meanwhile."""
    longest = {"put": 0.0, "get": 0.0, "stats": 0.0}
    with ChunkStore.open(root, memory_limit=0) as store, ChunkStore.open(root, memory_limit=0) as other:
        StoreAdmin(store).rebuild_index()  # from now on all of it is listed
        done = threading.Event()
        number = 10**9

        def use() -> None:
            nonlocal number
            while not done.is_set():
                number += 1
                record = next(_records(number))
                calls: dict[str, Callable[[], object]] = {
                    "put": partial(other.put, record),
                    "get": partial(other.get_canonical, _CONTEXT, record.chunk_id),
                    "stats": StoreAdmin(other).stats,
                }
                for name, call in calls.items():
                    longest[name] = max(longest[name], _seconds(call))
                time.sleep(0.02)

        user = threading.Thread(target=use)
        user.start()
        seconds = _seconds(StoreAdmin(store).rebuild_index)
        done.set()
        user.join()
    waited = {f"longest {name} meanwhile s": round(value, 3) for name, value in longest.items()}
    return {"seconds": round(seconds, 2), **waited}


def _look_ups(root: Path, count: int, draw: random.Random) -> dict[str, float]:
    """Microseconds of `get_canonical`, of the plain reading of the same files, and of `has_canonical`."""
    chunks = [_chunk(draw.randrange(count)) for _ in range(_LOOKUPS)]
    codec = Codec()
    with ChunkStore.open(root, memory_limit=0) as store:
        names = {info.chunk_id: info.key for info in store.ls("canonical")}
        for chunk in chunks:  # once, so that all of it is in the system's cache
            _path(root, codec.name(names[chunk])).read_bytes()
        took = {
            "read": [_seconds(_path(root, names[chunk]).read_bytes) for chunk in chunks],
            "get": [_seconds(lambda chunk=chunk: store.get_canonical(_CONTEXT, chunk)) for chunk in chunks],
            "has": [_seconds(lambda chunk=chunk: store.has(_CONTEXT, chunk)) for chunk in chunks],
        }
    return {
        f"{name} {label} us": round(1e6 * sorted(values)[int(share * len(values))], 1)
        for name, values in took.items()
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def _locked(root: Path, count: int, draw: random.Random) -> dict[str, float]:
    """The longest look-up and listing while a writer of another process keeps its lock for seconds."""
    receive, send = _FORK.Pipe(duplex=False)
    with ChunkStore.open(root, memory_limit=0) as store:
        StoreAdmin(store).stats()
        child = _FORK.Process(target=_hold, args=(root, send))
        child.start()
        receive.recv()
        got = max(
            _seconds(lambda: store.get_canonical(_CONTEXT, _chunk(draw.randrange(count)))) for _ in range(300)
        )
        listed = _seconds(lambda: store.ls(limit=100))
        child.join()
    return {"longest of 300 gets s": round(got, 4), "ls of 100 s": round(listed, 4)}


def _hold(root: Path, send: Connection) -> None:
    db = sqlite3.connect(root / "index.sqlite", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    send.send(True)
    time.sleep(_LOCKED_SECONDS)
    db.execute("ROLLBACK")
    os._exit(0)


def _bulk(root: Path) -> dict[str, float]:
    """MiB/s of `verify`, and of reading and hashing the same files one after the other."""
    with ChunkStore.open(root, memory_limit=0) as store:
        for number in range(_BULK):
            kv = {name: torch.full((8, _BULK_TOKENS, 64), number, dtype=torch.bfloat16) for name in "kv"}
            ids, positions = torch.zeros(_BULK_TOKENS, dtype=torch.int64), torch.zeros(1, _BULK_TOKENS).long()
            store.put(CanonicalRecord(_chunk(number), _CONTEXT, ids, positions, kv_of([kv])))
        size = StoreAdmin(store).stats().bytes / 2**20
        files = list(root.glob("objects/*"))

        def plain() -> None:
            for file in files:
                hashlib.sha256(file.read_bytes()).digest()

        plain()
        return {
            "MiB": round(size),
            "verify MiB/s": round(size / _seconds(StoreAdmin(store).verify)),
            "read and sha256 MiB/s": round(size / _seconds(plain)),
        }


def _in_child(root: Path, call: Callable[[Path, Connection], None]) -> float:
    receive, send = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=call, args=(root, send))
    child.start()
    seconds = float(receive.recv())
    child.join()
    return seconds


def _open(root: Path, send: Connection) -> None:
    start = time.perf_counter()
    store = ChunkStore.open(root)
    send.send(time.perf_counter() - start)
    store.close()


def _listing(root: Path, send: Connection) -> None:
    with ChunkStore.open(root) as store:
        send.send(_seconds(StoreAdmin(store).stats))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

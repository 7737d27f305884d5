"""Keys of somebody else among a store's in a remote; ``--size`` is the number of the store's objects.

A real Redis (or Valkey) and moto's S3 server hold a few objects. One foreign key at a time is put where the
store lists: among objects, pins and quarantined copies; of another type, huge, empty, with ``..`` or
``//`` in its name, a name of a thousand characters or of bytes that are no text, a folder's marker. Then a
store that knows of nothing does all that a store can.

A finding: an operation that fails or answers otherwise than without the foreign key, a breaker that is
not closed at the end, and a foreign key that has gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from kamera.store import ChunkStore, StoreAdmin
from lab.reliability import rig
from lab.reliability.findings import Findings
from lab.reliability.redis_server import RedisServer
from lab.reliability.s3_server import BUCKET, S3Server

SIZE: int = 4
FOLDERS = ("objects/", "pins/", "quarantine/")
_NEW = 500  # a slot that nobody holds before
_HUGE = 64 * 2**20

NAMES: dict[str, tuple[bytes, bytes]] = {
    "text": (b"readme.txt", b"nothing of a store"),
    "empty": (b"empty", b""),
    "huge": (b"huge", bytes(_HUGE)),
    "..": (b"../" * 4 + b"x", b"x"),
    ".. within": (b"a/../" + b"b" * 64, b"x"),
    "//": (b"a//b", b"x"),
    "a folder": (b"", b""),
    "line break": (b"a\nb\x00c", b"x"),
    "long": (b"l" * 700, b"x"),
    "not UTF-8": (b"\xff\xfe" + b"a" * 62, b"x"),
}
TYPES = ("list", "hash", "set", "stream")
"""Of a Redis key; its name is like an object's. (A string of such a name is an object that is damaged.)"""


class Place(Protocol):
    """A remote with one store in it."""

    def url(self) -> str: ...
    def clear(self) -> None: ...
    def prefix(self) -> bytes:
        """What stands before the folders' names."""

    def plants(self) -> dict[str, Callable[[bytes], Callable[[], bool]]]:
        """By kind, what plants a key in a folder; that returns whether the key is still there."""


def run(size: int, seed: int, kinds: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Every kind of key in every folder of either server, or some ``kinds`` by server."""
    found = Findings()
    for name in SERVERS if kinds is None else kinds:
        with SERVERS[name]() as server:
            for kind in server.plants() if kinds is None else kinds[name]:
                for folder in FOLDERS:
                    _one(name, server, kind, folder, size, found)
    return found.figures()


def _one(name: str, place: Place, kind: str, folder: str, size: int, found: Findings) -> None:
    place.clear()
    with ChunkStore.open(place.url()) as store:
        for slot in range(size):
            rig.put(store, slot, 1)
        if store.flush(60).unsaved:
            raise RuntimeError(f"{name} takes nothing")
    where = f"{name}, {kind!r} in {folder}"
    try:
        is_there = place.plants()[kind](place.prefix() + folder.encode())
    except Exception as error:  # this server has no such keys
        found.done[f"not possible: {where} ({type(error).__name__})"] += 1
        return
    found.done["foreign keys"] += 1
    with ChunkStore.open(place.url(), memory_limit=0) as store:
        for operation, (work, wanted) in _operations(store, size).items():
            found.done["operations"] += 1
            try:
                answer = work()
            except Exception as error:
                found.add(f"{where}: {operation} fails", f"{type(error).__name__}: {error}")
                continue
            if answer != wanted:
                found.add(f"{where}: {operation} is wrong", f"{answer!r} for {wanted!r}")
        stats = StoreAdmin(store).stats().remote
        assert stats is not None
        if (stats.reads, stats.writes) != ("closed", "closed"):
            found.add(f"{where}: the breaker opened", stats.last_error)
    if not is_there():
        found.add(f"{where}: it has gone")


def _operations(store: ChunkStore, size: int) -> dict[str, tuple[Callable[[], Any], Any]]:
    """What is done, in this order, and what comes of it without a foreign key."""
    last, keys = size - 1, sorted(rig.record(slot, 1).key for slot in range(size))
    rest = sorted({*keys, rig.record(_NEW, 1).key} - {rig.record(0, 1).key, rig.record(last, 1).key})

    def pinned() -> list[str]:
        # a pin that cannot be read holds until it is let go: a stranger's is listed beside ours
        StoreAdmin(store).pin(keys[:1])
        held = [pin.name for pin in StoreAdmin(store).pins.list() if pin.name in keys]
        StoreAdmin(store).unpin(keys[:1])
        return held + [pin.name for pin in StoreAdmin(store).pins.list() if pin.name in keys]

    def put() -> int:
        rig.put(store, _NEW, 2)
        return len(store.flush(60).unsaved) + 10 * rig.get(store, _NEW)

    return {
        "get": (lambda: [rig.get(store, slot) for slot in range(size)], [1] * size),
        "ls": (lambda: sorted(info.key for info in store.ls()), keys),
        "census": (lambda: sum(held.objects for held in StoreAdmin(store).census().kinds.values()), size),
        "contexts_of": (lambda: len(store.contexts_of(rig.chunk(2))), int(size > 2)),
        "quarantined": (lambda: len(StoreAdmin(store).quarantine.copies()), 0),
        "verify": (
            lambda: (StoreAdmin(store).verify().ok, len(StoreAdmin(store).verify().quarantined)),
            (size, 0),
        ),
        "pin and unpin": (pinned, keys[:1]),
        "put": (put, 20),
        "gc, dry": (lambda: len(StoreAdmin(store).gc(0, dry_run=True).removed), size + 1),
        "forget": (
            # a stranger under an object's name is named among what is left: who can tell what it holds?
            lambda: (
                len(StoreAdmin(store).forget(rig.chunk(0)).removed),
                [
                    why
                    for why in StoreAdmin(store).forget(rig.chunk(0)).left
                    if any(key in why for key in keys)
                ],
            ),
            (1, []),
        ),
        "delete": (lambda: StoreAdmin(store).delete(rig.record(last, 1).key), True),
        "gc": (lambda: sorted(gone.key for gone in StoreAdmin(store).gc(0, quarantine_age=0).removed), rest),
        "ls of nothing": (store.ls, []),
    }


# -- the servers -----------------------------------------------------------------------------------


class _Redis:
    def __init__(self, server: RedisServer) -> None:
        self._server, self._client = server, server.client()

    def url(self) -> str:
        return self._server.url("timeout=30&retries=0")

    def clear(self) -> None:
        self._client.flushall()

    def prefix(self) -> bytes:
        keys: Any = self._client.keys("*")
        return next(key for key in keys if b"objects/" in key).partition(b"objects/")[0]

    def plants(self) -> dict[str, Callable[[bytes], Callable[[], bool]]]:
        def text(kind: str) -> Callable[[bytes], Callable[[], bool]]:
            name, value = NAMES[kind]
            return lambda folder: self._planted(folder + name, lambda key: self._client.set(key, value))

        makers: dict[str, Callable[[bytes], Any]] = {
            "list": lambda key: self._client.rpush(key, b"x"),
            "hash": lambda key: self._client.hset(key, b"field", b"x"),
            "set": lambda key: self._client.sadd(key, b"x"),
            "stream": lambda key: self._client.xadd(key, {b"field": b"x"}),
        }
        types: dict[str, Callable[[bytes], Callable[[], bool]]] = {
            kind: lambda folder, make=makers[kind]: self._planted(folder + b"a" * 64, make) for kind in TYPES
        }
        return {**{kind: text(kind) for kind in NAMES}, **types}

    def _planted(self, key: bytes, make: Callable[[bytes], Any]) -> Callable[[], bool]:
        make(key)
        return lambda: bool(self._client.exists(key))


class _S3:
    def __init__(self, server: S3Server) -> None:
        import boto3

        self._server = server
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def url(self) -> str:
        return self._server.url("timeout=30&retries=0")

    def clear(self) -> None:
        self._server.reset()

    def prefix(self) -> bytes:
        return next(key for key in self._keys() if "objects/" in key).partition("objects/")[0].encode()

    def plants(self) -> dict[str, Callable[[bytes], Callable[[], bool]]]:
        def text(kind: str) -> Callable[[bytes], Callable[[], bool]]:
            name, value = NAMES[kind]
            return lambda folder: self._planted((folder + name).decode(), value)

        return {kind: text(kind) for kind in NAMES}

    def _planted(self, key: str, value: bytes) -> Callable[[], bool]:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=value)
        if key not in self._keys():
            raise ValueError("the server made another key of it")
        return lambda: key in self._keys()

    def _keys(self) -> list[str]:
        listed = self._client.list_objects_v2(Bucket=BUCKET, EncodingType="url").get("Contents", [])
        return [entry["Key"] for entry in listed]


@contextmanager
def _redis() -> Iterator[Place]:
    with RedisServer() as server:
        yield _Redis(server)


@contextmanager
def _s3() -> Iterator[Place]:
    server = S3Server()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield _S3(server)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.stop()


SERVERS: dict[str, Callable[[], AbstractContextManager[Place]]] = {"redis": _redis, "s3": _s3}

"""Small objects that tell their own version, and children that can be killed at any point.

A child is forked, not started: importing torch once is enough. It inherits no open store.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kamera.ops import LowRank, Patch, kv_of
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord

CONTEXT = Context("f" * 64, "a" * 64)
_WIDTH = 600  # float32: an object takes more than one write of a page
CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "stat", "flock")
"""Calls to the system that a write, a deletion or an opening makes."""
_PLACES = {"flock": fcntl}
STATEMENTS = ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT")
"""What it says to SQLite."""

Record = CanonicalRecord | PatchRecord


def chunk(slot: int) -> str:
    """The chunk id of a slot."""
    return f"{slot:064x}"


def is_patch(slot: int) -> bool:
    """Half of the slots hold a patch, which is replaced; the others a canonical, which stays."""
    return slot % 4 < 2


def record(slot: int, version: int) -> Record:
    """The object of a slot; header and every number in it say ``version`` (below 2**24)."""
    if is_patch(slot):
        factors = LowRank(torch.full((2, 1), float(version)), torch.full((_WIDTH, 1), float(version)))
        return PatchRecord(chunk(slot), CONTEXT, (), "exact", Patch.of([{"v": factors}]), str(version))
    return CanonicalRecord(
        chunk_id=chunk(slot),
        context=CONTEXT,
        input_ids=torch.full((2,), version),
        positions=torch.full((1, 2), version),
        kv=kv_of([{"k": torch.full((1, 2, _WIDTH // 2), float(version))}]),
        info={"version": version},
    )


def version_of(found: Record) -> int:
    """The version ``found`` is of; -1 if its parts are of several."""
    said = int(found.formed if isinstance(found, PatchRecord) else found.info["version"])
    return said if all(bool((t == said).all()) for t in found.tensors().values()) else -1


def put(store: ChunkStore, slots: int | Sequence[int], version: int) -> None:
    """Store one version of a slot, or of several together; raises the first error."""
    for put in store.put_many(
        [record(slot, version) for slot in ([slots] if isinstance(slots, int) else slots)]
    ):
        if put.error is not None:
            raise put.error


def get(store: ChunkStore, slot: int) -> int:
    """The stored version of a slot; 0 if there is none, -1 if it is of several."""
    found: Record | None
    if is_patch(slot):
        found = store.get_patch(CONTEXT, chunk(slot), ())
    else:
        found = store.get_canonical(CONTEXT, chunk(slot))
    return 0 if found is None else version_of(found)


def fork(work: Callable[[], None]) -> int:
    """The process id of a child that does ``work`` and ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


@contextmanager
def around(calls: tuple[str, ...], wrapped: Callable[[str, Callable[..., Any]], Any]) -> Iterator[None]:
    """Inside, each of ``calls`` is what ``wrapped`` makes of its name and the real one."""
    places: list[tuple[Any, str]] = [(_PLACES.get(name, os), name) for name in calls]
    real = [getattr(module, name) for module, name in places]
    for (module, name), call in zip(places, real, strict=True):
        setattr(module, name, wrapped(name, call))
    try:
        yield
    finally:
        for (module, name), call in zip(places, real, strict=True):
            setattr(module, name, call)


class Statements:
    """A SQLite connection whose statements go through ``said`` (first word, the real call)."""

    def __init__(self, real: Any, said: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._real = real
        self._said = said

    def execute(self, sql: str, values: Any = ()) -> Any:
        return self._said(sql.split(None, 1)[0].upper(), lambda: self._real.execute(sql, values))

    def executemany(self, sql: str, values: Any) -> Any:
        return self._said(sql.split(None, 1)[0].upper(), lambda: self._real.executemany(sql, values))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def listen(store: ChunkStore, said: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Have every statement of ``store``'s index go through ``said`` from now on."""
    index: Any = store._disk.index  # type: ignore[union-attr]
    index.keys()  # it connects when it is used
    index._db = Statements(index._db, said)


def die() -> None:
    """End this process as a loss of power would: nothing is flushed, nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)

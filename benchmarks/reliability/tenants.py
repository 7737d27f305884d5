"""Tenants in pairs; ``size`` is how many random pairs of an owner and a stranger.

Each pair shares a directory: the owner stores chunks, the stranger (another tenant, or another secret, or
none) asks for the very same ones in every way a store can be asked, and then the owner does. Once per
kind of stranger, the steps (calls into C, the system's and SQLite's among them) of a foreign look-up are
compared between a directory where the owner has the chunk and one where it has another.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.store import ChunkStore, Context, PatchRecord, StoreAdmin

SIZE: int = 100
_SLOTS = 4
# who is answered what does not depend on the disk, so none is waited for where there is memory to write to
_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _get(store: ChunkStore, context: Context, record: Any) -> Any:
    if isinstance(record, PatchRecord):
        return store.get_patch(context, record.chunk_id, ())
    return store.get_canonical(context, record.chunk_id)


def _has(store: ChunkStore, context: Context, record: Any) -> bool:
    if isinstance(record, PatchRecord):
        return store.has(context, record.chunk_id, ())
    return store.has(context, record.chunk_id)


QUESTIONS: dict[str, Callable[[ChunkStore, Context, Any], Any]] = {
    "get": _get,
    "has": _has,
    "ls": lambda s, c, r: s.ls(),
    "ls of the chunk": lambda s, c, r: s.ls(chunk_id=r.chunk_id),
    "census": lambda s, c, r: StoreAdmin(s).census().chunks,
    "verify": lambda s, c, r: StoreAdmin(s).verify().ok,
}
STRANGERS = ("another tenant", "another secret", "another tenant, no secret", "no secret")


def run(size: int, seed: int) -> dict[str, Any]:
    """What strangers and owners asked and were answered, and how many look-ups told by their steps."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for i in range(size):
        with tempfile.TemporaryDirectory(dir=_PLACE) as place:
            _pair(Path(place), STRANGERS[i % len(STRANGERS)], rng, counts)
    steps = {kind: _same_steps(kind, rng) for kind in STRANGERS}
    return {
        "pairs": size,
        "questions by strangers": counts["asked"],
        "answered to strangers": counts["answered to a stranger"],
        "deleted by strangers": counts["deleted"],
        "questions by owners": counts["asked"],
        "answered to owners": counts["answered to its owner"],
        "hidden from owners": counts["asked"] - counts["answered to its owner"],
        "look-ups compared step by step": sum(total for total, _ in steps.values()),
        "look-ups whose steps told": sum(told for _, told in steps.values()),
    }


def _pair(root: Path, kind: str, rng: random.Random, counts: Counter[str]) -> None:
    owner: dict[str, Any] = {"tenant": "acme", "secret": rng.randbytes(32)}
    if rng.random() < 0.5:
        owner["keys"] = [rng.randbytes(32)]
    with (
        ChunkStore.open(root, memory_limit=0, **owner) as mine,
        ChunkStore.open(root, memory_limit=0, **_stranger(kind, owner, rng)) as theirs,
    ):
        slots = rng.sample(range(1000), _SLOTS)
        names = [_put(mine, slot) for slot in slots]
        for slot, name in zip(slots, names, strict=True):
            record = rig.record(slot, 1)
            for ask in QUESTIONS.values():
                counts["asked"] += 1
                counts["answered to a stranger"] += bool(ask(theirs, _context(theirs), record))
            counts["deleted"] += StoreAdmin(theirs).delete(name) + bool(
                StoreAdmin(theirs).forget(record.chunk_id).removed
            )
            for ask in QUESTIONS.values():
                counts["answered to its owner"] += bool(ask(mine, _context(mine), record))


def _same_steps(kind: str, rng: random.Random) -> tuple[int, int]:
    """Look-ups compared, and how many took other steps where the owner has the chunk."""
    owner: dict[str, Any] = {"tenant": "acme", "secret": rng.randbytes(32)}
    options = _stranger(kind, owner, rng)
    asked = rig.record(1, 1)
    seen = []
    for stored in (1, 5):  # of one kind
        with (
            tempfile.TemporaryDirectory(dir=_PLACE) as root,
            ChunkStore.open(root, **owner) as mine,
            ChunkStore.open(root, **options) as theirs,
        ):
            _put(mine, stored)
            quick = {name: QUESTIONS[name] for name in ("get", "has", "ls", "ls of the chunk", "census")}
            for ask in quick.values():  # nothing for the first time
                ask(theirs, _context(theirs), asked)
            told = [partial(ask, theirs, _context(theirs), asked) for ask in quick.values()]
            seen.append([steps_of(ask) for ask in told])
    return len(seen[0]), sum(one != other for one, other in zip(*seen, strict=True))


def steps_of(action: Callable[[], Any]) -> list[str]:
    """Every call into C, those of the operating system and of SQLite among them, in order.

    `sys.setprofile` sees them all. What takes the same steps takes no telling time.
    """
    steps: list[str] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            steps.append(f"{type(getattr(argument, '__self__', None)).__name__}.{argument.__name__}")

    gc.disable()  # the collector may finalize some object of another test in the middle of a look-up
    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return steps


def _stranger(kind: str, owner: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    if kind == "another tenant":
        return owner | {"tenant": "beta"}
    if kind == "another secret":
        return owner | {"secret": rng.randbytes(32)}
    return {"tenant": "beta" if kind.startswith("another") else "acme"}


def _context(store: ChunkStore) -> Context:
    return replace(rig.CONTEXT, tenant=store.tenant)


def _put(store: ChunkStore, slot: int) -> str:
    record = replace(rig.record(slot, 1), context=_context(store))
    return store.put(record)

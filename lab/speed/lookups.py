"""Look-ups in a store of many small objects: what is measured is finding, not reading.

Each chunk is a canonical of one token, every tenth has a patch. They get in as files that the store's own
codec encoded, and the index is made from them: the very files and rows that puts make, without the
three fsyncs of each.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kamera import ChunkStore
from kamera.ops import LowRank, Patch, kv_of
from kamera.store import CanonicalRecord, Context, PatchRecord, StoreAdmin
from kamera.store.codec import Codec
from lab.speed.table import Row

CONTEXT = Context("f" * 64, "a" * 64)
LOOKUPS = 100
"""Look-ups of each kind in one round."""
_PATCHED = 10  # every such chunk has a patch

Call = Callable[[], object]


def chunk_id(number: int) -> str:
    """The chunk called ``number``."""
    return f"{number:064x}"


def records(number: int) -> Iterator[CanonicalRecord | PatchRecord]:
    """What is stored of it."""
    one = torch.full((1, 1, 4), number % 128, dtype=torch.int8)
    places = torch.zeros(1, 1, dtype=torch.int64)
    yield CanonicalRecord(chunk_id(number), CONTEXT, torch.tensor([number]), places, kv_of([{"k": one}]))
    if number % _PATCHED == 0:
        patch = Patch.of([{"k": LowRank(torch.ones(1, 1), torch.ones(4, 1))}])
        yield PatchRecord(chunk_id(number), CONTEXT, antecedents(number), "exact", patch, "exact")


def antecedents(number: int) -> tuple[str, str]:
    """What a patched chunk stands behind."""
    return chunk_id(number + 1), chunk_id(number + 2)


def fill(root: Path, start: int, stop: int) -> None:
    """Put chunks ``start`` to ``stop`` into the store at ``root``."""
    with ChunkStore.open(root, memory_limit=0) as store:
        for record in records(start):  # makes the directory what it has to be
            store.put(record)
        for number in range(start + 1, stop):
            for record in records(number):
                _write(root, record)
        StoreAdmin(store).rebuild_index()


def lookups(root: Path, count: int, calls: int) -> list[Row]:
    """One row for each kind of look-up, ``calls`` each, in a store of ``count`` chunks.

    It keeps nothing in memory. Raises AssertionError for a look-up that does not find what it must.
    """
    with ChunkStore.open(root, memory_limit=0) as store:
        kinds = _kinds(store, count, random.Random(0))
        return [{"chunks": count, "look-up": name, **_timed(call, calls)} for name, call in kinds.items()]


def _kinds(store: ChunkStore, count: int, draw: random.Random) -> dict[str, Call]:
    def any_id() -> str:
        return chunk_id(draw.randrange(count))

    def patched() -> tuple[str, tuple[str, str]]:
        number = _PATCHED * draw.randrange(-(-count // _PATCHED))
        return chunk_id(number), antecedents(number)

    return {
        "has_canonical": lambda: store.has(CONTEXT, any_id()),
        "has_patch": lambda: store.has(CONTEXT, *patched()),
        "patch_info": lambda: store.info(CONTEXT, *patched()),
        "get_canonical": lambda: store.get_canonical(CONTEXT, any_id()),
        "get_patch": lambda: store.get_patch(CONTEXT, *patched()),
        "a miss": lambda: not store.has(CONTEXT, chunk_id(count + draw.randrange(count))),
    }


def _timed(call: Call, calls: int) -> Row:
    median, worst = percentiles(call, calls)
    return {"p50 ms": 1e3 * median, "p99 ms": 1e3 * worst}


def percentiles(call: Call, calls: int) -> tuple[float, float]:
    """Median and 99th percentile of ``calls`` calls, in seconds; each must find what it looks for."""
    taken = []
    gc.disable()  # its pauses are the process's, not the store's
    try:
        for _ in range(calls):
            began = time.perf_counter()
            found = call()
            taken.append(time.perf_counter() - began)
            assert found
    finally:
        gc.enable()
    taken.sort()
    return taken[calls // 2], taken[calls * 99 // 100]


def _write(root: Path, record: CanonicalRecord | PatchRecord) -> None:
    codec, created = Codec(), 1e9
    name = codec.name(record.key)
    path = root / "objects" / f"{name}.safetensors"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    data = codec.encode(record, created)
    path.write_bytes(data)

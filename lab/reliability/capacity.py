"""Capacity: does a store answer as fast with 100 000 chunks as with 1 000?

``size`` counts chunks; each is one canonical of one token, and every tenth has a patch. Measured at a
hundredth, a tenth and all of it. How objects get in: the first 200 at each size by the store's own
`put` (its rate is reported: three fsyncs each). The others are files that the store's own
codec encoded, written without fsync, and the index is made from them: the very files and rows that
puts make, but not as safe while they are made. Nothing here decides on a threshold.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kamera.ops import LowRank, Patch, kv_of
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord, StoreAdmin
from kamera.store.codec import Codec
from lab.speed.lookups import percentiles

SIZE = 100_000

_FORK = multiprocessing.get_context("fork")  # the others import torch once more, for seconds

_CONTEXT = Context("f" * 64, "a" * 64)
_PUT = 200  # by the whole write path, at each size
_LOOKUPS = 2_000


def run(size: int, seed: int) -> dict[str, Any]:
    """Figures at three sizes, and how much they grew from the first to the last."""
    folder = Path(tempfile.mkdtemp(prefix="kamera-capacity-"))
    draw = random.Random(seed)
    sizes = sorted({max(_PUT, size // 100), max(_PUT, size // 10), size})
    points: dict[str, dict[str, float]] = {}
    try:
        held = 0
        for wanted in sizes:
            filled = _fill(folder / "store", held, wanted)
            held = wanted
            points[f"{wanted} chunks"] = {**filled, **_measure(folder / "store", wanted, draw)}
        first, last = points[f"{sizes[0]} chunks"], points[f"{sizes[-1]} chunks"]
        grown = {
            name: round(last[name] / value, 2) for name, value in first.items() if value and name in last
        }
        return {**points, f"growth over {sizes[-1] / sizes[0]:.0f} times as many": grown} | {
            "gc": _collect(folder / "store")
        }
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


def _fill(root: Path, start: int, stop: int) -> dict[str, float]:
    """Chunks ``start`` to ``stop``: some put, the others written in bulk."""
    with ChunkStore.open(root, memory_limit=0) as store:
        begun = time.perf_counter()
        for number in range(start, min(start + _PUT, stop)):
            for record in _records(number):
                store.put(record)
        put = time.perf_counter() - begun
        for number in range(start + _PUT, stop):
            for record in _records(number):
                _write(root, record)
        StoreAdmin(store).rebuild_index()
    return {"put objects/s": round(1.1 * min(_PUT, stop - start) / put, 1)}


def _write(root: Path, record: CanonicalRecord | PatchRecord) -> None:
    codec, created = Codec(), 1e9
    name = codec.name(record.key)
    path = root / "objects" / f"{name}.safetensors"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    data = codec.encode(record, created)
    path.write_bytes(data)


def _measure(root: Path, count: int, draw: random.Random) -> dict[str, float]:
    figures: dict[str, float] = {}
    opened = [_open(root) for _ in range(3)]
    figures["open ms"] = round(1e3 * min(seconds for seconds, _ in opened), 3)
    figures["open MiB"] = round(statistics.median(held for _, held in opened) / 2**20, 2)
    with ChunkStore.open(root, memory_limit=0) as store:

        def patched() -> tuple[str, tuple[str, str]]:
            number = 10 * draw.randrange(count // 10)
            return _chunk(number), (_chunk(number + 1), _chunk(number + 2))

        calls: dict[str, Callable[[], object]] = {
            "has": lambda: store.has(_CONTEXT, _chunk(draw.randrange(count))),
            "get": lambda: store.get_canonical(_CONTEXT, _chunk(draw.randrange(count))),
            "miss": lambda: not store.has(_CONTEXT, _chunk(count + draw.randrange(count))),
            "patch_info": lambda: store.info(_CONTEXT, *patched()),
            "contexts_of": lambda: store.contexts_of(_chunk(draw.randrange(count))),
        }
        for name, call in calls.items():
            p50, p99 = _percentiles(call)
            figures[f"{name} p50 us"], figures[f"{name} p99 us"] = p50, p99
        figures["stats ms"] = _milliseconds(StoreAdmin(store).stats)
        figures["ls of 100 ms"] = _milliseconds(lambda: store.ls(limit=100))
        figures["ls of all ms"] = _milliseconds(store.ls)
        figures["gc dry run ms"] = _milliseconds(lambda: StoreAdmin(store).gc(0, dry_run=True))
    figures["index MiB"] = round((root / "index.sqlite").stat().st_size / 2**20, 2)
    return figures


def _open(root: Path) -> tuple[float, float]:
    """Seconds of opening the store in a process that has not seen it, and resident bytes it adds."""
    receive, send = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_opened, args=(root, send))
    child.start()
    seconds, held = receive.recv()
    child.join()
    return seconds, held


def _opened(root: Path, send: Connection) -> None:
    before = _resident()
    start = time.perf_counter()
    store = ChunkStore.open(root)
    seconds = time.perf_counter() - start
    send.send((seconds, _resident() - before))
    store.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _collect(root: Path) -> dict[str, float]:
    """Collect half of the store."""
    with ChunkStore.open(root, memory_limit=0) as store:
        begun = time.perf_counter()
        report = StoreAdmin(store).gc(StoreAdmin(store).stats().bytes // 2)
        seconds = time.perf_counter() - begun
    return {
        "objects before": report.objects_before,
        "objects after": report.objects_after,
        "seconds": round(seconds, 2),
        "objects/s": round(len(report.removed) / seconds, 1),
    }


def _percentiles(call: Callable[[], object]) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    median, worst = percentiles(call, _LOOKUPS)
    return round(1e6 * median, 1), round(1e6 * worst, 1)


def _milliseconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return round(1e3 * min(taken), 3)

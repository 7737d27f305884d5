"""What a store costs: its writes, its look-ups, its reads, and the code that they go through.

* ``batch``: twenty objects put together, beside one by one; beside a plain file of as many bytes that is
  written and synced; and beside twenty, each synced by one of four threads, or all by ``os.sync``;
  ``syncs`` are calls of ``os.fsync`` and ``os.sync``.
* ``lookups``: `has`, `info`, a page of `ls` and a search among ``--rows`` objects of a directory.
* ``recall``: a chunk's KV read and verified from the page cache, and laid into a slot, beside the same from
  memory.
* ``ahead``: a reorder of SmolLM2's window whose canonicals and patches come from a remote 20 ms away: looked
  up in one request and read ahead, several at once; and one after another.
* ``edits``: Python calls of a slide and of a reorder that show four stored patches, 28 layers.
* ``entered``: files of the product that a batch and a look-up that hits memory enter; lines and files of the
  room.

    python -m benchmarks.store [batch lookups recall ahead edits entered] [--rows 100000] [--threads 1]
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch as replacing

import torch

from benchmarks import report
from benchmarks.calls import INSIDE, called
from benchmarks.store.content import CONTEXT, canonical, gqa, patched_window, pictured
from kamera import Backbone, ChunkStore, KameraWindow
from kamera.ops import kv_slice
from kamera.ops.kernels import serve as apply_to
from kamera.patches import Catalogue
from kamera.store import ObjectInfo
from kamera.store.remote import BlobHead, ObjectBlobs

ROUNDS = 15
MIB = 2**20
FAR = 0.02
"""Seconds to a remote."""
NOTE = "Note {0}: the ferry to island {0} leaves at {0} and comes back with mail, milk and a few guests. " * 4


def batch(options: Any) -> Iterator[report.Row]:
    """Twenty objects of a MiB, and as many bytes in plain files, in ways that take turns."""
    records = [canonical(i, 256, 64) for i in range(20)]
    data = bytes(sum(record.nbytes for record in records))
    ways: dict[str, Callable[[ChunkStore, Path], object]] = {
        "a batch": lambda store, place: store.put_many(records),
        "one by one": lambda store, place: [store.put(record) for record in records],
        "a plain file": lambda store, place: _write_files(place, [data]),
        "20 plain files, four threads": lambda store, place: _write_files(place, [data[:MIB]] * 20),
        "20 plain files, one os.sync": lambda store, place: _write_files(
            place, [data[:MIB]] * 20, at_once=True
        ),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    syncs: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with (
                tempfile.TemporaryDirectory(dir=options.directory) as place,
                ChunkStore.open(f"{place}/store") as store,
                replacing("os.fsync", wraps=os.fsync) as synced,
                replacing("os.sync", wraps=os.sync) as all_synced,
            ):
                took[name].append(_seconds(partial(way, store, Path(place))))
                syncs[name] = synced.call_count + all_synced.call_count
    for name in ways:
        times = median(a / b for a, b in zip(took[name], took["a plain file"], strict=True))
        row = {
            "what": name if "plain" in name else f"20 objects of 1 MiB: {name}",
            "syncs": syncs[name],
            "ms": median(took[name]) * 1e3,
        }
        yield {**row, "times": times, "of": "a plain file"}


def lookups(options: Any) -> Iterator[report.Row]:
    """A look-up by key, one by header, a page and a search, among many rows."""
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        store = ChunkStore.open(place, memory_limit=0)
        width = 1000
        for start in range(0, options.rows, width):
            stop = min(start + width, options.rows)
            puts = store.put_many([pictured(i) for i in range(start, stop)])
            assert all(put.error is None for put in puts), "the rows are stored"
            report.progress(f"lookups: {stop} of {options.rows} rows stored")
        ids = [pictured(i * 997 % options.rows).chunk_id for i in range(400)]
        asked: dict[str, Callable[[str], object]] = {
            "has": lambda chunk: store.has(CONTEXT, chunk),
            "info": lambda chunk: store.info(CONTEXT, chunk),
            "ls of one chunk": lambda chunk: store.ls(chunk_id=chunk),
            "search": lambda chunk: store.search(chunk, 5, context=CONTEXT),
        }
        store.search(ids[0], 5, context=CONTEXT)  # reads the features once
        for name, ask in asked.items():
            took = [_seconds(partial(ask, chunk)) * 1e3 for chunk in ids]
            what = f"{name} among {options.rows:,}"
            yield {"what": what, "ms": median(took), "p99 ms": quantiles(took, n=100)[98]}
        store.close()


def recall(options: Any) -> Iterator[report.Row]:
    """A chunk of 1,024 tokens, 28 layers: read, and read and laid into a slot; disk and memory take turns."""
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        record = canonical(0, 1024, 128, layers=28)
        with ChunkStore.open(place) as store:
            store.put(record)
        slot = kv_slice(canonical(1, 2048, 128, layers=28).kv, 1024, 2048)
        held, cold = ChunkStore.open(place), ChunkStore.open(place, memory_limit=0)
        took: dict[str, list[float]] = {}

        def lay(store: ChunkStore) -> None:
            found = store.get_canonical(CONTEXT, record.chunk_id)
            assert found is not None, "it is stored"
            apply_to(slot, found.kv, None, gqa(28, 128), [1024])

        lay(held)
        ways: dict[str, Callable[[], object]] = {
            "memory: get and apply": lambda: lay(held),
            "page cache: get": lambda: cold.get_canonical(CONTEXT, record.chunk_id),
            "page cache: get and apply": lambda: lay(cold),
            "a copy of its bytes": lambda: [t.clone() for t in record.tensors().values()],
        }
        for _ in range(ROUNDS):
            for name, work in ways.items():
                took.setdefault(name, []).append(_seconds(work))
        base = took["memory: get and apply"]
        for name, seconds in took.items():
            times = median(a / b for a, b in zip(seconds, base, strict=True))
            what = f"recall of {record.nbytes / MIB:.0f} MiB, {name}"
            yield {"what": what, "ms": median(seconds) * 1e3, "times": times, "of": "memory: get and apply"}
        held.close()
        cold.close()


def ahead(options: Any) -> Iterator[report.Row]:
    """A reorder that reads all it shows, at once or one after another; the ways take turns."""
    backbone = Backbone.from_pretrained("smollm2")
    get, heads, order = ObjectBlobs.get, ObjectBlobs.read_heads, [4, 3, 2, 1, 0]
    requests = [0]

    def far_get(blobs: ObjectBlobs, name: str) -> bytes | None:
        time.sleep(FAR)
        return get(blobs, name)

    def far_heads(blobs: ObjectBlobs, names: Sequence[str], size: int) -> list[BlobHead | None]:
        requests[0] += 1
        time.sleep(FAR)
        return heads(blobs, names, size)

    def none_ahead(store: ChunkStore, infos: Sequence[ObjectInfo]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        url, saved = f"obstore+file://{place}/remote", f"{place}/window"
        with ChunkStore.open(url) as store:
            window = KameraWindow(backbone, store, system="You read notes.")
            for i in range(5):
                window.append(NOTE.format(i))
            window.save(saved)
            window.reorder(order)  # forms what the others read
            window.flush()
        took: dict[str, list[float]] = {"one after another": [], "at once": []}
        look_ups: dict[str, int] = {}
        for _ in range(ROUNDS):
            for way, seconds in took.items():
                with contextlib.ExitStack() as ways:
                    ways.enter_context(replacing.object(ObjectBlobs, "get", far_get))
                    ways.enter_context(replacing.object(ObjectBlobs, "read_heads", far_heads))
                    if way == "one after another":
                        ways.enter_context(replacing.object(ChunkStore, "read_ahead", none_ahead))
                        ways.enter_context(replacing.object(Catalogue, "gather", lambda rows: False))
                    cold = ways.enter_context(ChunkStore.open(url))
                    window, requests[0] = KameraWindow.load(saved, backbone, cold), 0
                    started = time.perf_counter()
                    window.reorder(order)
                    seconds.append(time.perf_counter() - started)
                    look_ups[way] = requests[0]
        for way, seconds in took.items():
            times = median(a / b for a, b in zip(seconds, took["one after another"], strict=True))
            row = {"what": f"reorder from a remote 20 ms away, {way}", "look-ups": look_ups[way]}
            row["ms"] = median(seconds) * 1e3
            yield {**row, "times": times, "of": "one after another"}


def edits(options: Any) -> Iterator[report.Row]:
    """A slide and a reorder that show four stored patches, counted."""
    for kind in ("memory", "directory"):
        with tempfile.TemporaryDirectory(dir=options.directory) as place:
            for name in ("slide", "reorder"):
                url = "memory://" if kind == "memory" else f"{place}/{name}"
                work, window = patched_window(url, name)
                calls = called(work).calls
                patched = sum(bool(slot.rank) for slot in window.slots)
                what = f"{name}, four stored patches, 28 layers, {kind}"
                yield {"what": what, "Python calls": calls, "patches shown": patched}


def entered(options: Any) -> Iterator[report.Row]:
    """Files of the product that a batch of new objects and a look-up in memory enter; the room's size."""
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        store = ChunkStore.open(place)
        store.put(canonical(0, 4, 8))
        new = [canonical(i, 4, 8) for i in range(1, 4)]
        for name, work in {
            "put_many of new objects": lambda: store.put_many(new),
            "a look-up that hits memory": lambda: store.get_canonical(CONTEXT, new[0].chunk_id),
        }.items():
            seen = called(work)
            row = {"what": name, "files entered": len(seen.files), "Python calls": seen.calls}
            yield {**row, "which": " ".join(seen.files)}
    room = [*sorted((INSIDE / "store").glob("*.py")), INSIDE / "files.py", INSIDE / "forks.py"]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in room)
    yield {"what": "the room, with files.py and forks.py", "files": len(room), "lines": lines}


WHAT = {
    "batch": batch,
    "lookups": lookups,
    "recall": recall,
    "ahead": ahead,
    "edits": edits,
    "entered": entered,
}


def _write_files(place: Path, files: Sequence[bytes], *, at_once: bool = False) -> None:
    def write(number: int) -> None:
        with open(place / f"plain {number}", "wb") as file:
            file.write(files[number])
            file.flush()
            if not at_once:
                os.fsync(file.fileno())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(files))))
    if at_once:
        os.sync()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("store", __doc__)
    parser.add_argument("what", nargs="*", choices=[[], *WHAT], help="default: all")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where stores are made, default: the temporary folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[report.Row] = []
    for name in options.what or WHAT:
        rows += WHAT[name](options)
        report.progress(f"{name}: done")
    report.tell(options, "What a store costs", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

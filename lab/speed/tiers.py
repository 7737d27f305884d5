"""One chunk from memory, from the page cache and from a cold disk, and a window's recall from each."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from kamera import ChunkStore
from kamera.engines.hf import forwards
from kamera.ops import kv_map
from kamera.ops.kernels import serve
from kamera.store.digests import DIGESTS, DigestName
from lab.speed.moves import Deck
from lab.speed.settings import Settings
from lab.speed.stock import Stock
from lab.speed.table import Cell, Row
from lab.speed.timing import Arm, Measured, measure

CHUNKS = 4
"""Chunks in the windows that recall one more."""
_BLOCK = 1 << 20  # dd bs=1M


MEMORY, CACHED, COLD = "memory", "page cache", "cold"
THEN = ": read, then applied"


def digests() -> list[DigestName]:
    """The digests this machine can verify by."""
    return [name for name in DIGESTS if name != "blake3" or find_spec("blake3")]


def chunk_rows(root: Path, stock: Stock, digest: DigestName, settings: Settings) -> list[Row]:
    """Rows for chunks of ``stock``: `get_canonical`, reading and applying, and a window's recall.

    Each tier has a store of its own below ``root``: files that one has mapped would not become cold for
    another. The first keeps in memory what is put; the others little more than one chunk, so that the next
    is not there.
    """
    with ChunkStore.open(root / MEMORY, memory_limit="16GiB", digest=digest) as store:
        held = stock.on(store)
        ids = [held.chunk(i).id for i in range(CHUNKS + 2)]
        size = max(info.bytes for i in ids for info in store.ls("canonical", chunk_id=i))
        read = _get(root, held, ids[0], settings)
        recalled = _recall(root, held, size, digest, settings)
    rows = [*_get_rows(read, size), *_recall_rows(recalled, read)]
    return [{"tokens": stock.tokens, "digest": digest, "MB": size / 1e6, **row} for row in rows]


def _get(root: Path, stock: Stock, chunk_id: str, settings: Settings) -> Measured:
    file, context = _file(root / MEMORY, stock.store, chunk_id), stock.context
    with ChunkStore.open(root / MEMORY, memory_limit=0) as disk:
        reader = Reader(disk, stock, chunk_id)
        arms = [
            Arm(MEMORY, lambda: stock.store.get_canonical(context, chunk_id)),
            Arm(CACHED, lambda: disk.get_canonical(context, chunk_id)),
            Arm("read()", lambda: read(file)),
            Arm(f"{CACHED}{THEN}", reader.whole),
        ]
        if can_cool():

            def cold() -> None:
                cool([file])

            arms += [
                Arm(COLD, lambda _: disk.get_canonical(context, chunk_id), cold),
                Arm("dd", lambda _: read(file), cold),
                Arm("dd, direct", lambda _: read(file, direct=True), cold),
                Arm(f"{COLD}{THEN}", lambda _: reader.whole(), cold),
            ]
        return measure(
            arms, "cpu", rounds=settings.rounds, min_rounds=settings.min_rounds, seconds=settings.seconds
        )


class Reader:
    """Reads one chunk and writes it into a slot, patched and turned."""

    def __init__(self, store: ChunkStore, stock: Stock, chunk_id: str) -> None:
        self._store, self._stock, self._chunk_id = store, stock, chunk_id
        self.slot = forwards.allocate_kv(stock.backbone, stock.tokens)
        self._offset = [stock.tokens] * stock.backbone.axes

    def whole(self) -> None:
        """All of it is read, then all of it applied."""
        record = self._store.get_canonical(self._stock.context, self._chunk_id)
        assert record is not None
        kv = kv_map(record.kv, lambda t: t.to(self._stock.backbone.model.device))
        serve(self.slot, kv, self._stock.factors, self._stock.backbone.layout, self._offset)


def _get_rows(timed: Measured, size: int) -> list[Row]:
    yardstick = {CACHED: "read()", COLD: "dd"}
    rows: list[Row] = []
    for name in timed.seconds:
        row: dict[str, Cell] = {
            "what": f"get: {name}" if name in (MEMORY, *yardstick) else name,
            "ms": timed.spread(name).times(1e3),
            "GB/s": size / 1e9 / timed.spread(name).median,
        }
        if name in yardstick:
            row["times memory"] = timed.ratio(name, MEMORY)
            row["share of dd"] = timed.ratio(yardstick[name], name)
        rows.append(row)
    return rows


def _recall(root: Path, stock: Stock, size: int, digest: DigestName, settings: Settings) -> Measured:
    names = [CACHED, COLD] if can_cool() else [CACHED]
    limit = size + size // 2
    stores = [ChunkStore.open(root / name, memory_limit=limit, digest=digest) for name in names]
    try:
        decks = dict(zip([MEMORY, *names], [stock, *map(stock.on, stores)], strict=True))
        arms = [_recall_arm(root, name, Deck(of, CHUNKS)) for name, of in decks.items()]
        return measure(
            arms,
            settings.device,
            rounds=settings.rounds,
            min_rounds=settings.min_rounds,
            seconds=settings.seconds,
            warmup=2,
        )
    finally:
        for store in stores:
            store.close()


def _recall_arm(root: Path, name: str, deck: Deck) -> Arm:
    recall = next(m for m in deck.moves() if m.name == "recall")

    def before() -> Callable[[], object]:
        deck.ready(deck.chunks)
        act = recall.prepare(deck)
        if name == COLD:
            cool((root / name / "objects").rglob("*.safetensors"))
        return act

    def run(act: Callable[[], object]) -> None:
        act()
        assert deck.forwards == 0, "a recall ran a forward"

    return Arm(name, run, before)


def _recall_rows(timed: Measured, read: Measured) -> list[Row]:
    """Recalls; beside them, what reading and then recalling from memory would take."""
    memory = timed.spread(MEMORY).median
    rows: list[Row] = []
    for name in timed.seconds:
        took = timed.spread(name)
        row: dict[str, Cell] = {
            "what": f"recall: {name}",
            "ms": took.times(1e3),
            "times memory": timed.ratio(name, MEMORY),
        }
        if name != MEMORY:
            row["of read, then apply"] = took.median / (read.spread(name).median + memory)
        rows.append(row)
    return rows


def read(path: Path, *, direct: bool = False) -> int:
    """Read a file in blocks of a mebibyte, as ``dd bs=1M`` does (``iflag=direct``); bytes read."""
    block = mmap.mmap(-1, _BLOCK)
    done = 0
    held = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        while got := os.readv(held, [block]):
            done += got
    finally:
        os.close(held)
        block.close()
    return done


def cool(paths: Iterable[Path]) -> None:
    """Have the system forget what it cached of these files."""
    for path in paths:
        held = os.open(path, os.O_RDONLY)
        try:
            os.fsync(held)
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(held)


def can_cool() -> bool:
    """Whether this system can be told to."""
    return hasattr(os, "posix_fadvise") and hasattr(os, "O_DIRECT")


def _file(root: Path, store: ChunkStore, chunk_id: str) -> Path:
    key = store.ls("canonical", chunk_id=chunk_id)[0].key
    return next((root / "objects").rglob(f"{key}*"))

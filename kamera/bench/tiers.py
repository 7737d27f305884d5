"""One chunk from memory, from the page cache and from a cold disk, and a window's recall from each."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kamera import Backbone, ChunkStore
from kamera.bench.moves import Deck
from kamera.bench.presets import Preset
from kamera.bench.settings import Settings
from kamera.bench.stock import Stock
from kamera.bench.table import Row
from kamera.bench.timing import Arm, measure

CHUNKS = 4
"""Chunks in the windows that recall one more."""
_BLOCK = 1 << 20  # dd bs=1M


@dataclass(frozen=True)
class Tier:
    """Where a chunk is before it is asked for."""

    name: str
    memory_limit: int
    cold: bool = False


def chunk_rows(root: Path, backbone: Backbone, chosen: Preset, tokens: int, settings: Settings) -> list[Row]:
    """Rows for chunks of ``tokens`` tokens in a store at ``root``: `get_canonical`, and `recall`.

    A window's store keeps little more than one chunk in memory, so that the next is not there; that of
    the first tier keeps all.
    """
    with ChunkStore.open(root, memory_limit="16GiB") as store:
        stock = Stock(backbone, chosen, store, tokens)
        ids = [stock.chunk(i).id for i in range(CHUNKS + 2)]
        size = max(info.bytes for i in ids for info in store.ls("canonical", chunk_id=i))
        reading = _get(root, store, stock, ids[0], size, settings)
        recalling = _recall(root, stock, size, settings)
    return [{"tokens": tokens, "MB": size / 1e6, **row} for row in (*reading, *recalling)]


def _get(
    root: Path, memory: ChunkStore, stock: Stock, chunk_id: str, size: int, settings: Settings
) -> list[Row]:
    file = _file(root, memory, chunk_id)
    with ChunkStore.open(root, memory_limit=0) as disk:
        context = stock.context
        arms = {
            "memory": Arm("memory", lambda: memory.get_canonical(context, chunk_id)),
            "page cache": Arm("page cache", lambda: disk.get_canonical(context, chunk_id)),
            "read()": Arm("read()", lambda: read(file)),
        }
        if _can_cool():
            arms["cold"] = Arm("cold", lambda _: disk.get_canonical(context, chunk_id), lambda: cool([file]))
            arms["dd"] = Arm("dd", lambda _: read(file), lambda: cool([file]))
            arms["dd, direct"] = Arm("dd, direct", lambda _: read(file, direct=True), lambda: cool([file]))
        timed = measure(
            list(arms.values()),
            "cpu",
            rounds=settings.rounds,
            min_rounds=settings.min_rounds,
            seconds=settings.seconds,
        )
    yardstick = {"page cache": "read()", "cold": "dd"}
    rows: list[Row] = []
    for name in arms:
        took = timed.spread(name)
        against = yardstick.get(name)
        rows.append(
            {
                "what": f"get: {name}" if name in ("memory", *yardstick) else name,
                "ms": took.times(1e3),
                "GB/s": size / 1e9 / took.median,
                "times memory": timed.ratio(name, "memory") if name in yardstick else None,
                "share of dd": None if against is None else timed.ratio(against, name),
            }
        )
    return rows


def _recall(root: Path, stock: Stock, size: int, settings: Settings) -> list[Row]:
    tiers = [Tier("memory", 1 << 34), Tier("page cache", size + size // 2)]
    if _can_cool():
        tiers.append(Tier("cold", size + size // 2, cold=True))
    stores = [ChunkStore.open(root, memory_limit=t.memory_limit) for t in tiers]
    try:
        decks = [Deck(stock.on(store), CHUNKS) for store in stores]
        arms = [_recall_arm(root, t, d) for t, d in zip(tiers, decks, strict=True)]
        timed = measure(
            arms,
            settings.device,
            rounds=settings.rounds,
            min_rounds=settings.min_rounds,
            seconds=settings.seconds,
            warmup=2,
        )
        assert not any(d.forwards for d in decks), "a recall ran a forward"
    finally:
        for store in stores:
            store.close()
    return [
        {
            "what": f"recall: {tier.name}",
            "ms": timed.spread(tier.name).times(1e3),
            "times memory": timed.ratio(tier.name, "memory"),
        }
        for tier in tiers
    ]


def _recall_arm(root: Path, tier: Tier, deck: Deck) -> Arm:
    recall = next(m for m in deck.moves() if m.name == "recall")

    def before() -> Callable[[], object]:
        deck.ready(deck.chunks)
        act = recall.prepare(deck)
        if tier.memory_limit > 1 << 33:  # what others brought is met here for the first time
            deck.stock.store.get_canonical(deck.stock.context, deck.spare().id)
        if tier.cold:
            cool((root / "objects").rglob("*.safetensors"))
        return act

    return Arm(tier.name, lambda act: act(), before)


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


def _can_cool() -> bool:
    return hasattr(os, "posix_fadvise") and hasattr(os, "O_DIRECT")


def _file(root: Path, store: ChunkStore, chunk_id: str) -> Path:
    key = store.ls("canonical", chunk_id=chunk_id)[0].key
    return next((root / "objects").rglob(f"{key}*"))

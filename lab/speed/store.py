"""``python -m lab.speed store``: from disk to attention, and how long it takes to find a chunk among many."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kamera import ChunkStore
from lab.speed.lookups import LOOKUPS, fill, lookups
from lab.speed.presets import preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.stock import Stock
from lab.speed.table import GOALS, Result, Row, Section, goal, model_facts, result
from lab.speed.tiers import CACHED, COLD, chunk_rows, digests
from lab.speed.timing import Spread

NOTES = (
    "get: a whole canonical, verified; recall: a window's own operation, from reading to the written slot",
    "memory: the store's own tier; page cache: read before, not kept by the store; cold: the system was "
    "told to forget the file (posix_fadvise) just before",
    "dd: the same file, as cold, read in blocks of 1 MiB; direct: past the page cache",
    "of read, then apply: below 1 where layers are applied while others are read",
    "digest: the hash that what is read is verified by",
    "share of dd: how fast against dd (cold), or against read() of the same file (page cache)",
)


def run(settings: Settings, step: Step = unwatched) -> Result:
    """Measure stores of ``stored`` small chunks, and one chunk of every length in each tier."""
    chosen = preset(settings.preset)
    backbone = settings.build(chosen)
    total = len(settings.stored) + len(settings.lengths)
    found: list[Row] = []
    read: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kamera-store-") as folder:
        held = 0
        for done, count in enumerate(sorted(settings.stored)):
            step(done, total)
            fill(Path(folder) / "small", held, count)
            found += lookups(Path(folder) / "small", count, LOOKUPS * settings.rounds)
            held = count
        for done, tokens in enumerate(settings.lengths, len(settings.stored)):
            step(done, total)
            stock = Stock(backbone, chosen, ChunkStore.open("memory://"), tokens)
            for digest in digests():
                read += chunk_rows(Path(folder) / f"{tokens}-{digest}", stock, digest, settings)
    step(total, total)
    sections = [
        Section("Look-ups", tuple(found)),
        Section("One chunk from each tier", tuple(read)),
        Section(GOALS, tuple(goals(found, read, max(settings.stored), max(settings.lengths)))),
    ]
    return result("store", settings, model_facts(chosen, backbone), sections, NOTES)


def goals(found: Sequence[Row], read: Sequence[Row], stored: int, tokens: int) -> list[Row]:
    """The goals this benchmark has figures for: the largest store, the longest chunk, every digest."""
    slowest = max(float(row["p99 ms"]) for row in found if row["chunks"] == stored)  # type: ignore[arg-type]
    out = [goal(f"look-ups among {stored:,} chunks: p99, ms", slowest, most=1.0)]
    for row in read:
        recall, share, how = (
            row.get("times memory"),
            row.get("share of dd"),
            f"{tokens} tokens, {row['digest']}",
        )
        if row["tokens"] != tokens:
            continue
        if row["what"] == f"recall: {CACHED}" and isinstance(recall, Spread):
            out.append(
                goal(f"recall from the page cache: times as long as from memory ({how})", recall, most=1.5)
            )
        if row["what"] == f"get: {COLD}" and isinstance(share, Spread):
            out.append(goal(f"read from a cold disk: share of dd ({how})", share, least=0.8))
    return out

"""What verifying costs, and a chunk from memory, from the page cache and from a cold disk to its place.

    python -m lab.from_disk [--tokens 1024] [--rounds 15] [--threads 1] [--folder DIR] [--output FILE]

Shapes of Qwen2.5-VL-7B (28 layers, 4 heads of 128, bf16), noise for numbers, a patch of 3 % of the KV's
bytes. Arms take turns, medians are told; ``cpu ms`` is the processor time of all threads (the least of the
rounds), which other processes on the machine disturb little. ``share of dd``: how fast against reading
the file in blocks of 1 MiB. The disk is cooled by asking the system to forget the file's pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kamera.ops import KV, LowRank, Patch, RopeSpec, attention_layout, kv_of, layer_groups
from kamera.ops.kernels import serve
from kamera.store import CanonicalRecord, ChunkStore, Context
from kamera.store.digests import DIGESTS, hasher_of
from lab.speed.machine import commit, machine

LAYERS, HEADS, DIM = 28, 4, 128
CONTEXT, CHUNK = Context("f" * 64, "a" * 64), "c" * 64
OFFSET = (7, 7, 7)
_ROPE = RopeSpec(tuple(1e6 ** (-i / 64) for i in range(64)), (0,) * 16 + (1,) * 24 + (2,) * 24, 3, "half")
LAYOUT = [attention_layout(HEADS, 28, DIM, DIM, _ROPE)] * LAYERS


class Arm(NamedTuple):
    """Something to time, and what is done before each time."""

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None


def record(tokens: int) -> CanonicalRecord:
    """A canonical of noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(HEADS, tokens, DIM, generator=generator).bfloat16()
    kv = kv_of([{"k": noise.roll(i, 1), "v": noise.roll(-i, 1)} for i in range(LAYERS)])
    positions = torch.arange(tokens).expand(3, tokens)
    return CanonicalRecord(CHUNK, CONTEXT, torch.arange(tokens), positions, kv)


def patch_for(tokens: int) -> Patch:
    """A patch of noise, of 3 % of the KV's bytes."""
    rank = max(1, int(0.03 * tokens * HEADS * DIM / (tokens + HEADS * DIM)))

    def factors() -> LowRank:
        return LowRank(torch.randn(tokens, rank).bfloat16(), torch.randn(HEADS * DIM, rank).bfloat16())

    return Patch.of([{"k": factors(), "v": factors()} for _ in range(LAYERS)], layer_groups(LAYOUT))


class Slot:
    """A place in a live cache, and the ways to fill it."""

    def __init__(self, tokens: int) -> None:
        self.kv = kv_of(
            [{name: torch.zeros(HEADS, tokens, DIM, dtype=torch.bfloat16) for name in "kv"} for _ in LAYOUT]
        )
        self.patch = patch_for(tokens)

    def fill(self, source: KV) -> None:
        """All layers at once."""
        serve(self.kv, source, self.patch, LAYOUT, OFFSET)

    def whole(self, store: ChunkStore) -> None:
        """The record first, then all layers."""
        found = store.get_canonical(CONTEXT, CHUNK)
        assert found is not None
        self.fill(found.kv)


def read(file: Path) -> None:
    """As ``dd bs=1M of=/dev/null`` does."""
    block = bytearray(1 << 20)
    with open(file, "rb", buffering=0) as opened:
        while opened.readinto(block):
            pass


def cool(file: Path) -> None:
    """Have the system forget what it knows of ``file``."""
    with open(file, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def speeds(size: int = 64 << 20) -> dict[str, float]:
    """GB/s of each hash on one core, and of a plain copy."""
    data = memoryview(os.urandom(size))
    target = memoryview(bytearray(size))

    def copied() -> None:
        target[:] = data

    works: dict[str, Callable[[], object]] = {
        "copy": copied,
        "blake2b": lambda: hashlib.blake2b(data).digest(),
    }
    for digest in DIGESTS:
        begin = hasher_of(digest)
        works[digest] = lambda begin=begin: begin().update(data)
    found: dict[str, float] = {}
    for name, work in works.items():
        took = []
        for _ in range(5):
            start = time.process_time()
            work()
            took.append(time.process_time() - start)
        found[name] = round(size / min(took) / 1e9, 2)
    return found


def run(tokens: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each arm."""
    slot, made = Slot(tokens), record(tokens)
    memory = ChunkStore.open("memory://", memory_limit="64GiB")
    memory.put(made)
    arms = {"memory: apply": Arm(lambda: slot.whole(memory))}
    stores = []
    for digest in DIGESTS:
        with ChunkStore.open(folder / digest, digest=digest) as store:
            store.put(made)
        disk = ChunkStore.open(folder / digest, memory_limit=0)
        [file] = (folder / digest).glob("objects/*.safetensors")
        stores.append(disk)
        arms["page cache: dd"] = Arm(lambda file=file: read(file))
        arms[f"page cache: get, {digest}"] = Arm(lambda disk=disk: disk.get_canonical(CONTEXT, CHUNK))
        arms[f"page cache: get and apply, {digest}"] = Arm(lambda disk=disk: slot.whole(disk))
        cold = lambda file=file: cool(file)  # noqa: E731
        arms["cold: dd"] = Arm(lambda file=file: read(file), cold)
        arms[f"cold: get, {digest}"] = Arm(lambda disk=disk: disk.get_canonical(CONTEXT, CHUNK), cold)
    size = file.stat().st_size
    wall: dict[str, list[float]] = {name: [] for name in arms}
    used: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            arm.before()
            start, busy = time.perf_counter(), time.process_time()
            arm.work()
            if turn:  # the first warms up
                wall[name].append(time.perf_counter() - start)
                used[name].append(time.process_time() - busy)
    for store in (memory, *stores):
        store.close()
    base, least = statistics.median(wall["memory: apply"]), min(used["memory: apply"])
    rows = []
    for name in arms:
        took, dd = statistics.median(wall[name]), f"{name.partition(':')[0]}: dd"
        rows.append(
            {
                "what": name,
                "ms": round(took * 1e3, 1),
                "GB/s": round(size / took / 1e9, 2),
                "times memory": round(took / base, 2),
                "share of dd": round(statistics.median(wall[dd]) / took, 2) if dd in wall else None,
                "cpu ms": round(min(used[name]) * 1e3, 1),
                "cpu times memory": round(min(used[name]) / least, 2),
            }
        )
    return rows


def main() -> None:
    """Measure, and print a table and a document."""
    parser = argparse.ArgumentParser(prog="python -m lab.from_disk", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="write the JSON document there")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        rows = run(asked.tokens, asked.rounds, Path(folder))
    document = {
        "command": f"python -m lab.from_disk --tokens {asked.tokens} --threads {asked.threads}",
        "commit": commit(),
        "machine": machine(),
        "hash GB/s": speeds(),
        "rows": rows,
    }
    print(document["hash GB/s"])
    for row in rows:
        print(
            "  ".join(f"{name} {value}" if name != "what" else f"{value:40}" for name, value in row.items())
        )
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

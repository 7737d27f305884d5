"""What a batch of objects costs in a directory: calls to the system, and milliseconds beside puts one by one.

    python -m lab.put_many [--counts 1,2,20] [--kib 64] [--rounds 9] [--busy] [--folder DIR] [--output FILE]

Arms take turns, each on a store of its own: puts one by one; a batch of which each file and folder is synced;
a batch that syncs the file system as a whole. Medians and largest are told. ``--busy``: meanwhile another
process writes to the same disk, 200 MB at a time, and syncs nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from kamera.store import ChunkStore, EncodingRecord, encoding_context
from kamera.store.disk import syncing
from lab.reliability import rig
from lab.results import keep
from lab.speed.machine import commit, machine
from lab.walks.counter import tapped

CONTEXT = encoding_context("e" * 64, "")
ONE_BY_ONE, EACH, TOGETHER = "one by one", "a batch, each synced", "a batch, synced together"
_NOISE = 200 * 2**20  # bytes that the other process writes before it begins anew


def records(start: int, count: int, size: int) -> list[EncodingRecord]:
    """``count`` objects of ``size`` bytes each, that no store has."""
    noise = torch.randint(0, 256, (size,), dtype=torch.uint8)
    return [
        EncodingRecord(f"{n:064x}", CONTEXT, 1, {"inputs_embeds": noise}) for n in range(start, start + count)
    ]


def put_all(store: ChunkStore, made: Sequence[EncodingRecord], arm: str) -> None:
    """Put them as ``arm`` says; raises the first error."""
    assert store._disk is not None
    store._disk._syncs_all = arm == TOGETHER
    for batch in [[record] for record in made] if arm == ONE_BY_ONE else [made]:
        for put in store.put_many(batch):
            if put.error is not None:
                raise put.error


def counts(folder: Path, number: int, arm: str) -> dict[str, int]:
    """Calls of ``number`` puts to a store that is open and holds some objects already."""
    said: list[str] = []

    def heard(word: str, call: Callable[[], Any]) -> Any:
        said.append(word)
        return call()

    with ChunkStore.open(folder, memory_limit=0) as store, ExitStack() as held:
        put_all(store, records(10**6, 2, 64), arm)
        rig.listen(store, heard)
        with store._disk.index._db.writing():  # type: ignore[union-attr]  # what it says once
            pass
        said.clear()
        calls = {
            name: held.enter_context(tapped(owner, name))
            for owner, name in ((os, "open"), (os, "fsync"), (syncing, "_syncfs"), (fcntl, "flock"))
        }
        put_all(store, records(0, number, 64), arm)
        return {
            "syncs": len(calls["fsync"]) + len(calls["_syncfs"]),
            "locks": len(calls["flock"]) // 2,  # each is let go once
            "opens": len(calls["open"]),
            "statements": len(said),
        }


def times(folder: Path, number: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm, round by round."""
    took: dict[str, list[float]] = {ONE_BY_ONE: [], EACH: [], TOGETHER: []}
    for turn in range(rounds + 1):
        for arm in took:
            made = records(turn * number, number, size)
            with ChunkStore.open(folder / arm.replace(" ", "-"), memory_limit=0) as store:
                start = time.perf_counter()
                put_all(store, made, arm)
                if turn:  # the first makes the folders
                    took[arm].append((time.perf_counter() - start) * 1e3)
    return took


@contextmanager
def busy(folder: Path) -> Iterator[None]:
    """Another process writes to the disk of ``folder``."""

    def write() -> None:
        block = os.urandom(2**20)
        while True:
            with open(noise, "r+b", buffering=0) as file:
                for _ in range(_NOISE // len(block)):
                    file.write(block)
            time.sleep(0.5)

    noise = folder / "noise"
    noise.touch()
    child = rig.fork(write)
    try:
        while not noise.stat().st_size:
            time.sleep(0.1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run(folder: Path, numbers: Sequence[int], size: int, rounds: int, others: bool) -> list[dict[str, Any]]:
    """A row for each number of objects and arm."""
    rows = []
    for number in numbers:
        with busy(folder) if others else nullcontext():
            took = times(folder / f"timed-{number}", number, size, rounds)
        for arm, found in took.items():
            where = folder / f"counted-{number}-{arm.replace(' ', '-')}"
            row = {"objects": number, "arm": arm, **counts(where, number, arm)}
            rows.append(row | {"ms": round(statistics.median(found), 1), "largest ms": round(max(found), 1)})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table and a document."""
    parser = argparse.ArgumentParser(prog="python -m lab.put_many", description=__doc__)
    parser.add_argument("--counts", default="1,2,3,20,100", help="of objects in a batch")
    parser.add_argument("--kib", type=int, default=64, help="of an object")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="while another process writes")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="write the JSON document there")
    asked = parser.parse_args(arguments)
    numbers = [int(part) for part in asked.counts.split(",")]
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        rows = run(Path(folder), numbers, asked.kib * 1024, asked.rounds, asked.busy)
    told = f"--counts {asked.counts} --kib {asked.kib} --rounds {asked.rounds}" + " --busy" * asked.busy
    document = {
        "command": f"python -m lab.put_many {told}",
        "commit": commit(),
        "machine": machine(),
        "rows": rows,
    }
    if asked.output is not None:
        keep(document, asked.output)
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()

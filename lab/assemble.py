"""What windows of stored chunks run in the order of arrival and as placed. ``python -m lab.assemble``.

A library holds the canonicals of 8 to 64 pictures, and the patches that earlier windows of 8 of them (or of
all) left in the orders in which these came. Then the chunks of a window arrive in another order: those of an
earlier one ("again"), those and one more ("one more"), or those with one replaced ("one other"). Each is
assembled as given and as placed, on two layers of random weights; forwards and tokens are those of hooks on
the model. The engine runs adjacent chunks in one forward, so ``chunks``, the number that are prefilled,
says more than forwards. Only ``plan ms`` is a time: that of the plan, placement included.

    python -m lab.assemble [--sizes 8,16,32,64] [--draws 10] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.window import Arrange
from lab.placement import assembled as placed
from lab.results import keep
from lab.speed.content import picture_chunk
from lab.speed.machine import commit, machine
from lab.speed.presets import TINY

SIDE = 24  # tokens of a picture follow from it
WINDOW = 8
EARLIER = 4
"""Earlier windows for each eight chunks of a library."""

SYSTEM = torch.arange(10, 20)
LEAVES = ReusePolicy(certified=False, forms="always", tolerance=None, rank=4)
SERVES = ReusePolicy(certified=False, on_miss="prefill", tolerance=None, rank=4)


def leave(backbone: HfEngine, store: ChunkStore, chunks: Sequence[Chunk]) -> None:
    """A window that these chunks came into, one after another, leaves their patches."""
    window = KameraWindow(backbone, store, SYSTEM, policy=LEAVES)
    for chunk in chunks:
        window.append(chunk)
    window.flush()


def arrivals(
    random: Random, earlier: Sequence[Sequence[Chunk]], chunks: Sequence[Chunk], kind: str
) -> list[Chunk]:
    """The chunks of a later window, shuffled."""
    came = [*random.choice(earlier)]
    others = [chunk for chunk in chunks if chunk not in came]
    if kind == "one other":
        came.pop(random.randrange(len(came)))
    if kind != "again":
        came.append(random.choice(others))
    random.shuffle(came)
    return came


def assembled(
    backbone: HfEngine, store: ChunkStore, chunks: Sequence[Chunk], order: str
) -> tuple[int, int, float]:
    """Forwards, tokens and milliseconds of the plan of one assembly into an empty window."""
    window = KameraWindow(backbone, store, SYSTEM, policy=SERVES)
    window.flush()
    started = time.perf_counter()
    plan = window.plan(Arrange(chunks) if order == "given" else placed(window, chunks))
    took = (time.perf_counter() - started) * 1e3
    with backbone.measure() as work:
        window.run(plan)
    assert (work.forwards, work.tokens) == (plan.cost.forwards, plan.cost.tokens)
    return work.forwards, work.tokens, took


def rows_of(backbone: HfEngine, size: int, window: int, draws: int) -> list[dict[str, Any]]:
    """A row for each kind of later window over a library of ``size`` chunks."""
    random = Random(size * 100 + window)
    chunks = [picture_chunk(backbone, TINY, SIDE, seed) for seed in range(size)]
    earlier = [random.sample(chunks, window) for _ in range(EARLIER * size // window)]
    rows = []
    with ChunkStore.open("memory://") as store:
        for chunk in chunks:  # each was seen once
            leave(backbone, store, [chunk])
        for order in earlier:
            leave(backbone, store, order)
        for kind in ("again", "one more", "one other") if window < size else ("again",):
            came = [arrivals(random, earlier, chunks, kind) for _ in range(draws)]
            given, free = (
                [assembled(backbone, store, chunks, order) for chunks in came] for order in ("given", "free")
            )
            row: dict[str, Any] = {"library": size, "earlier windows": len(earlier), "window": len(came[0])}
            row |= {"arrives": kind, "draws": draws}
            for name, runs in (("given", given), ("placed", free)):
                row[f"chunks {name}"] = statistics.fmean(run[1] / chunks[0].num_tokens for run in runs)
                row[f"forwards {name}"] = statistics.fmean(run[0] for run in runs)
                row[f"tokens {name}"] = statistics.fmean(run[1] for run in runs)
            rows.append(row | {"plan ms": round(statistics.median(run[2] for run in free), 1)})
            print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table and a document."""
    parser = argparse.ArgumentParser(prog="python -m lab.assemble", description=__doc__)
    parser.add_argument("--sizes", default="8,16,32,64", help="chunks of a library")
    parser.add_argument("--draws", type=int, default=10, help="later windows of each kind")
    parser.add_argument("--output", type=Path, help="write the JSON document there")
    asked = parser.parse_args(arguments)
    backbone = TINY.build(dtype=torch.float32)
    rows = []
    for size in [int(part) for part in asked.sizes.split(",")]:
        for window in dict.fromkeys([min(WINDOW, size), size]):
            rows += rows_of(backbone, size, window, asked.draws)
    document = {
        "command": f"python -m lab.assemble --sizes {asked.sizes} --draws {asked.draws}",
        "commit": commit(),
        "machine": machine(),
        "rows": rows,
    }
    if asked.output is not None:
        keep(document, asked.output)


if __name__ == "__main__":
    main()

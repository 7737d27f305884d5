"""How long a look-up takes among prompts that share a header, and what a full index keeps.

    python -m lab.reuse.lookup [--prompts 100 10000 30000] [--output FILE]

Each prompt is one header of 192 tokens, 24 more that all of them open their first message with, and 200 of
its own. Asked are a new prompt of the header (``prefix``), the tail of a stored one behind another header
(``moved``), and a stored prompt (``same``): the median of 50 look-ups in CPU time. With ``limit`` the index
may take no more bytes than that; the last prompts have to be in it all the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from kamera.reuse import RULES, ContentIndex, Prompt
from lab.results import keep
from lab.speed.machine import commit, machine

HEADER, OPENING, OWN = 192, 24, 200
LOOKUPS = 50


def prompts(count: int) -> list[Prompt]:
    """Prompts of one header."""
    draw = np.random.default_rng(0)
    head = draw.integers(0, 150_000, HEADER + OPENING)
    own = draw.integers(0, 150_000, (count, OWN))
    return [Prompt.of(np.concatenate([head, one]), anchors=[HEADER]) for one in own]


def measure(count: int, limit: int | None) -> dict[str, Any]:
    """One row: milliseconds, bytes, and what was found."""
    index, given = ContentIndex(RULES["anchors"], limit=limit), prompts(count + LOOKUPS)
    started = time.process_time()
    for prompt in given[:count]:
        index.add(prompt)
    added = time.process_time() - started
    other = np.random.default_rng(1).integers(0, 150_000, HEADER)
    stored = given[count - LOOKUPS : count]
    asked = {
        "prefix": given[count:],
        "moved": [Prompt.of(np.concatenate([other, p.ids[HEADER:]]), anchors=[HEADER]) for p in stored],
        "same": stored,
    }
    row: dict[str, Any] = {"prompts": count, "limit": limit, "ms to add": 1e3 * added / count}
    for name, of in asked.items():
        times, found = [], 0
        for prompt in of:
            started = time.process_time()
            hits = index.find(prompt)
            times.append(time.process_time() - started)
            found += hits.prefix + sum(hit.stop - hit.start for hit in hits.hits)
        row[f"{name}: ms"] = 1e3 * statistics.median(times)
        row[f"{name}: tokens found"] = found / len(of)
    return {**row, "MiB": index.nbytes / 2**20, "evicted": index.evicted}


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.lookup")
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 10_000, 30_000])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = [measure(count, limit) for count in asked.prompts for limit in (None, 16 * 2**20)]
    for row in rows:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if asked.output is not None:
        command = f"python -m lab.reuse.lookup --prompts {' '.join(map(str, asked.prompts))}"
        keep({"command": command, "commit": commit(), "machine": machine(), "rows": rows}, asked.output)


if __name__ == "__main__":
    main()

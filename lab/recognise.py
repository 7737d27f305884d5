"""What it costs to find 64 stored chunks in a prompt among 50,000 objects, by rows alone.

Times are of the processor (of the one thread that runs), so that other work on the machine is not in them.

`python -m lab.recognise --out docs/results/recognise.json`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from kamera.engines import Placeholder, Recognised, match
from kamera.store import Context, ObjectInfo, Outline

CHUNKS, OBJECTS, ROUNDS = 64, 50_000, 300
CONTEXT = Context("f" * 64, "a" * 64)
START, END, PAD = 1, 2, 3


def chunk(number: int, draw: np.random.Generator) -> tuple[np.ndarray, int]:
    """Token ids, and the run of placeholders in them: pictures of a few sizes with a text, and texts."""
    text = draw.integers(10, 30_000, int(draw.integers(20, 400)))
    if number % 2:
        return np.array([START, START, *text]), 0  # a template begins every text alike
    run = int(draw.choice([64, 256, 576]))
    return np.array([START, *[PAD] * run, END, *text[: int(draw.integers(0, 24))]]), run


def row(number: int, ids: np.ndarray, run: int) -> ObjectInfo:
    """The row of a canonical."""
    places = torch.arange(len(ids))[None]
    outline = Outline.of(torch.from_numpy(ids), places, (len(ids),), (f"hash {number}",) if run else ())
    name = f"{number:064x}"
    return ObjectInfo(
        name,
        "canonical",
        name,
        CONTEXT,
        (),
        len(ids),
        None,
        None,
        1,
        0.0,
        base="v" if run else "",
        outline=outline,
    )


def measured(seed: int = 0) -> dict[str, object]:
    """Milliseconds of `match` over prompts of 64 chunks, all of them stored."""
    draw = np.random.default_rng(seed)
    made = [chunk(number, draw) for number in range(OBJECTS)]
    began = time.thread_time()
    known = Recognised(CONTEXT, (row(number, *one) for number, one in enumerate(made)))
    built = time.thread_time() - began
    times, tokens = [], []
    for _ in range(ROUNDS):
        numbers = draw.choice(OBJECTS, CHUNKS, replace=False)
        ids, media, at = [np.arange(40)], [], 40
        for number in numbers:
            own, run = made[number]
            ids.append(own)
            media += [Placeholder(at + 1, run, f"hash {number}")] if run else []
            at += len(own)
        prompt = np.concatenate(ids)
        began = time.thread_time()
        found = match(prompt, media, known, 40)
        times.append(1e3 * (time.thread_time() - began))
        tokens.append(len(prompt))
        assert [m.row.chunk_id for m in found] == [f"{n:064x}" for n in numbers]
    return {
        "objects": OBJECTS,
        "chunks": CHUNKS,
        "prompts": ROUNDS,
        "median_tokens": int(np.median(tokens)),
        "build_s": round(built, 2),
        "median_ms": round(float(np.median(times)), 3),
        "p99_ms": round(float(np.percentile(times, 99)), 3),
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out, found = parser.parse_args().out, measured()
    print(json.dumps(found, indent=1))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

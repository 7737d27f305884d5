"""MinHash signatures over token shingles: how fast, and how far from the truth.

    python -m lab.minhash [--output FILE]

rensa is what `lab.reuse.similar` uses; datasketch is measured where it is installed. 128 permutations,
shingles of 8 tokens, segments of 128 random ids, of which 1 to 11 are changed for the estimate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lab.results import keep
from lab.speed.machine import commit, machine

_SHINGLE = 8


def shingles(ids: np.ndarray) -> list[bytes]:
    """Each run of 8 ids as bytes."""
    raw = ids.astype("<u4").tobytes()
    return [raw[4 * i : 4 * (i + _SHINGLE)] for i in range(len(ids) - _SHINGLE + 1)]


def candidates() -> dict[str, Callable[[list[bytes]], Any]]:
    """Makers of signatures by library and class, those that can be imported."""
    found: dict[str, Callable[[list[bytes]], Any]] = {}
    try:
        import rensa

        for kind in ("RMinHash", "CMinHash"):

            def make(features: list[bytes], kind: str = kind) -> Any:
                made = getattr(rensa, kind)(num_perm=128, seed=42)
                made.update(features)
                return made

            found[f"rensa {kind}"] = make
    except ImportError:
        pass
    try:
        import datasketch
        from xxhash import xxh32_intdigest

        def sketch(features: list[bytes]) -> Any:
            made = datasketch.MinHash(128, seed=1, hashfunc=xxh32_intdigest)
            made.update_batch(features)
            return made

        found["datasketch MinHash (xxh32)"] = sketch
    except ImportError:
        pass
    return found


def measure(segments: int = 300) -> list[dict[str, Any]]:
    """Rows of microseconds of CPU time a segment, and the estimate's root mean square error and bias."""
    rows = []
    for name, make in candidates().items():
        draw = np.random.default_rng(0)
        texts = [draw.integers(0, 150_000, 128) for _ in range(segments)]
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            for ids in texts:
                make(shingles(ids))
            best = min(best, (time.process_time() - began) / segments)
        errors = []
        for ids in texts:
            other = ids.copy()
            other[draw.choice(128, int(draw.integers(1, 12)), replace=False)] += 1
            one, two = set(shingles(ids)), set(shingles(other))
            truth = len(one & two) / len(one | two)
            errors.append(make(shingles(ids)).jaccard(make(shingles(other))) - truth)
        error = float(np.sqrt(np.mean(np.square(errors))))
        rows.append({"library": name, "us": best * 1e6, "error": error, "bias": float(np.mean(errors))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.minhash")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = measure()
    for row in rows:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if asked.output:
        document = {
            "command": "python -m lab.minhash",
            "commit": commit(),
            "machine": machine(),
            "rows": rows,
        }
        keep(document, asked.output)


if __name__ == "__main__":
    main()

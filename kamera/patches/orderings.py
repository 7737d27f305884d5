"""Which orderings of antecedents an orbit patch is the mean of (paper, section 5)."""

from __future__ import annotations

import itertools
import math
import random


def balanced(count: int) -> list[tuple[int, ...]]:
    """The fewest orderings that stand for all: the given one first, each next to its reverse.

    Everything stands equally often in every place and before everything else (a Williams square; two of
    them for an odd count): ``count`` orderings, or twice as many, and all of them up to three.
    """
    if count <= 3:
        return list(itertools.permutations(range(count)))
    # 0, 1, -1, 2, -2, …: its steps are all different, so its shifts put everything behind everything once
    zigzag = [(i + 1) // 2 * (-1) ** (i + 1) % count for i in range(count)]
    rank = {item: i for i, item in enumerate(zigzag)}
    shifts = [tuple(rank[(item + by) % count] for item in zigzag) for by in range(count)]
    if count % 2 == 0:
        shifts = shifts[: count // 2]  # the others are the reverses of these
    return [order for shift in shifts for order in (shift, shift[::-1])]


def how_many(count: int, samples: int | None) -> int:
    """Orderings that `orderings` gives."""
    return len(balanced(count)) if samples is None else min(samples, math.factorial(count))


def orderings(count: int, samples: int | None, seed: int) -> list[tuple[int, ...]]:
    """Orderings to average over, in lexicographic order so that neighbours share a prefix.

    The `balanced` ones for None; otherwise ``samples`` of them (every one there is at most): the balanced
    ones first, the others drawn from ``seed``.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"samples {samples} must be at least 1")
    wanted = how_many(count, samples)
    if wanted == math.factorial(count):
        return list(itertools.permutations(range(count)))
    chosen = set(balanced(count)[:wanted])
    rng = random.Random(seed)
    while len(chosen) < wanted:
        chosen.add(tuple(rng.sample(range(count), count)))
    return sorted(chosen)

"""Orbit patches: one for a set of antecedents, the mean of what a chunk absorbs over their orderings."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from kamera.ops import Deltas, Formed, deficit, mean_deficit, uniform_offset
from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former
from kamera.patches.line import Line
from kamera.store import PatchRecord


def balanced_orderings(count: int) -> list[tuple[int, ...]]:
    """The smallest balanced set of orderings: the given one first, each next to its reverse.

    Each item is equally often at each place and before each other item (a Williams square; two of them for an
    odd count): ``count`` orderings, or twice as many for an odd count, and all of them up to a count of
    three.
    """
    if count <= 3:
        return list(itertools.permutations(range(count)))
    # 0, 1, -1, 2, -2, …: its steps are all different, so in its shifts each item follows each other once
    zigzag = [(i + 1) // 2 * (-1) ** (i + 1) % count for i in range(count)]
    rank = {item: i for i, item in enumerate(zigzag)}
    shifts = [tuple(rank[(item + by) % count] for item in zigzag) for by in range(count)]
    if count % 2 == 0:
        shifts = shifts[: count // 2]  # the others are the reverses of these
    return [order for shift in shifts for order in (shift, shift[::-1])]


def ordering_count(count: int, samples: int | None) -> int:
    """Number of orderings that `orderings` returns."""
    return len(balanced_orderings(count)) if samples is None else min(samples, math.factorial(count))


def orderings(count: int, samples: int | None, seed: int) -> list[tuple[int, ...]]:
    """Orderings to average over, in lexicographic order so that neighbours share a prefix.

    The `balanced_orderings` if ``samples`` is None; otherwise ``samples`` orderings (at most all there are):
    the balanced ones first, the others drawn from ``seed``.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"samples {samples} must be at least 1")
    wanted = ordering_count(count, samples)
    if wanted == math.factorial(count):
        return list(itertools.permutations(range(count)))
    chosen = set(balanced_orderings(count)[:wanted])
    rng = random.Random(seed)
    while len(chosen) < wanted:
        chosen.add(tuple(rng.sample(range(count), count)))
    return sorted(chosen)


def deficits(
    former: Former,
    target: Facts,
    canonical: Copy,
    antecedents: Sequence[Facts],
    perms: Sequence[tuple[int, ...]],
) -> Iterator[Deltas]:
    """The deficit of ``target`` behind its antecedents in each order; each prefix of orders runs once."""
    line = Line(former)
    for perm in perms:
        line.arrange([antecedents[i] for i in perm])
        copy = line.prefill(target)
        offset = uniform_offset(canonical.positions, copy.positions)
        assert offset is not None, "compact places of one chunk differ by one offset per axis"
        yield deficit(copy.kv, canonical.kv, former.backbone.layout, offset)


def form_orbit(
    former: Former, target: Facts, antecedents: Sequence[Facts], *, samples: int | None = None, seed: int = 0
) -> Formed:
    """Form the orbit patch of ``target`` behind the set ``antecedents`` and store it.

    ``samples`` and ``seed`` as in `orderings`. Runs one conditioned forward of the target per ordering,
    and one of an antecedent for each new prefix of an ordering; the first antecedent of an ordering is
    its canonical. Returns the patch and the share of the mean deficit's energy it keeps.
    """
    if not antecedents:
        raise ValueError("a leading chunk absorbs nothing: it needs no orbit patch")
    perms = orderings(len(antecedents), samples, seed)
    canonical = former.canonical(target)
    mean = mean_deficit(deficits(former, target, canonical, antecedents, perms))
    formed, filled = former.budget.form(mean, former.backbone.layout, canonical.kv)
    record = PatchRecord(
        chunk_id=target.chunk_id,
        context=former.context,
        antecedents=tuple(a.chunk_id for a in antecedents),
        kind="orbit",
        patch=formed.patch,
        formed="exact",
        info={"energy": formed.energy, **filled.to_info(), "orderings": len(perms)},
    )
    former.store.put(record)
    former.catalogue.forget(record.key)
    return formed

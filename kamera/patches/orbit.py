"""Orbit patches: one for a set of antecedents, the mean of what a chunk absorbs over their orderings."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.ops import (
    Blocks,
    Deltas,
    Formed,
    Patch,
    deficit,
    deficit_energies,
    kv_map,
    spread_error,
    uniform_offset,
)
from kamera.patches.background import put_owed
from kamera.patches.catalogue import serves
from kamera.patches.former import Former
from kamera.patches.making import Line, patch_to_put
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


class Mean:
    """The mean of what a chunk absorbs behind one set of antecedents, over the orders that were added."""

    def __init__(self) -> None:
        self._total: Deltas | None = None
        self._energies: torch.Tensor | None = None
        self.count = 0

    def add(self, deltas: Deltas) -> None:
        """Add the deficit behind one order."""
        self.count += 1
        own = deficit_energies(deltas)
        if self._total is None or self._energies is None:
            self._total, self._energies = kv_map(deltas, torch.clone), own
            return
        self._energies += own
        for mine, theirs in zip(self._total.parts, deltas.parts, strict=True):
            for name, delta in theirs.items():
                mine[name].add_(delta)

    @property
    def deltas(self) -> Deltas:
        """The mean."""
        assert self._total is not None, "a mean of at least one order"
        parts = [{name: x / self.count for name, x in block.items()} for block in self._total.parts]
        return Blocks(parts, self._total.groups)

    def error(self, patch: Patch) -> float:
        """Share of the deficits' energy that a patch of the mean leaves out, worst layer and channel."""
        assert self._energies is not None, "a mean of at least one order"
        return spread_error(self._energies, self.count, self.deltas, patch)


def form_orbit(
    former: Former,
    target: Encoded,
    antecedents: Sequence[Encoded],
    *,
    samples: int | None = None,
    seed: int = 0,
) -> Formed:
    """Form the orbit patch of ``target`` behind the set ``antecedents`` and store it.

    ``samples`` and ``seed`` as in `orderings`. Runs one conditioned forward of the target per ordering,
    and one of an antecedent for each new prefix of an ordering; the first antecedent of an ordering is
    its canonical. Returns the patch and the share of the mean deficit's energy it keeps.
    """
    if not antecedents:
        raise ValueError("a leading chunk absorbs nothing: it needs no orbit patch")
    canonical, line, mean = former.canonical(target), Line(former), Mean()
    for perm in orderings(len(antecedents), samples, seed):
        line.arrange([antecedents[i] for i in perm])
        mean.add(_deficit(former, canonical, line.prefill(target)))
    return _store(former, target, canonical, antecedents, mean)


MOST_NEIGHBOURS = 4
"""Chunks all of whose orders are prepared: the sets of others that may stand before each double with one."""


def form_orders(former: Former, front: Sequence[Encoded], chunks: Sequence[Encoded]) -> None:
    """Form and store what every order of ``chunks`` behind ``front`` is served with, without a forward.

    Each chunk gets a patch behind each set of others: an exact one behind none or one of them, an orbit patch
    behind more, over all orders of two, and over the rotations of three. What is stored already is not
    formed. Orders that begin alike share their forwards: 15 of one chunk each for three chunks, 52 for four.
    """
    needs: dict[tuple[int, ...], list[int]] = {}  # in this order stand the antecedents of these chunks
    for target in range(len(chunks)):
        others = [i for i in range(len(chunks)) if i != target]
        sets = (some for size in range(len(chunks)) for some in itertools.combinations(others, size))
        for some in sets:
            if not _is_stored(former, chunks[target], [*front, *(chunks[i] for i in some)], len(some)):
                for order in _rotations(some):
                    needs.setdefault(order, []).append(target)
    walked = {order[:n] for order in needs for n in range(1, len(order) + 1)}
    means: dict[tuple[int, frozenset[int]], Mean] = {}
    line = Line(former)

    def walk(path: tuple[int, ...]) -> None:
        for i in (i for i in range(len(chunks)) if i not in path):
            wanted, deeper = i in needs.get(path, ()), (*path, i) in walked
            if not (wanted or deeper):
                continue
            line.arrange([*front, *(chunks[j] for j in path)])
            before = line.before
            span = line.append(chunks[i]) if deeper else line.prefill(chunks[i])
            if wanted and len(path) > 1:
                added = _deficit(former, former.canonical(chunks[i]), span)
                means.setdefault((i, frozenset(path)), Mean()).add(added)
            elif wanted and before.names:
                put_owed(patch_to_put(former, chunks[i], span, before, ""))
            if deeper:
                walk((*path, i))

    for chunk in chunks:
        former.canonical(chunk)
    walk(())
    for (target, set_of), mean in means.items():
        encoded, antecedents = chunks[target], [*front, *(chunks[i] for i in sorted(set_of))]
        _store(former, encoded, former.canonical(encoded), antecedents, mean)


def _rotations(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All orders of up to two items; of more the rotations, in which each is at each place once."""
    return [(*items[n:], *items[:n]) for n in range(max(1, len(items)))]


def _is_stored(former: Former, target: Encoded, antecedents: Sequence[Encoded], chosen: int) -> bool:
    """True if the patch behind these antecedents, ``chosen`` of them in any order, is stored."""
    names = [encoded.chunk_id for encoded in antecedents]
    if not names:
        return True  # it leads
    row = former.catalogue.patch(target.chunk_id, names, "exact" if chosen < 2 else "orbit")
    return row is not None and serves(row, former.budget, target.num_tokens, former.max_error)


def _deficit(former: Former, canonical: Span, conditioned: Span) -> Deltas:
    offset = uniform_offset(canonical.positions, conditioned.positions)
    assert offset is not None, "compact places of one chunk differ by one offset per axis"
    return deficit(conditioned.kv, canonical.kv, former.backbone.layout, offset)


def _store(
    former: Former, target: Encoded, canonical: Span, antecedents: Sequence[Encoded], mean: Mean
) -> Formed:
    """Form the patch of a mean and store it as the orbit patch behind the set ``antecedents``."""
    formed, filled = former.budget.form(mean.deltas, former.backbone.layout, canonical.kv)
    told = {"energy": formed.energy, "error": mean.error(formed.patch), "orderings": mean.count}
    record = PatchRecord(
        chunk_id=target.chunk_id,
        context=former.context,
        antecedents=tuple(a.chunk_id for a in antecedents),
        kind="orbit",
        patch=formed.patch,
        formed="exact",
        info={**filled.to_info(), **told},
    )
    former.store.put(record)
    former.catalogue.forget(record.key)
    return formed

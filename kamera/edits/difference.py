"""Differences of two renderings of a conversation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.content import Rendered, Segment, common_prefix


@dataclass(frozen=True)
class Difference:
    """Indices of segments of the prompt ``before`` and of the one ``after``.

    ``kept``: pairs of equal segments in the same order in both, chosen to hold the most tokens. ``moved``:
    pairs of other equal segments. ``removed`` and ``inserted`` are the rest.
    """

    kept: tuple[tuple[int, int], ...]
    moved: tuple[tuple[int, int], ...]
    removed: tuple[int, ...]
    inserted: tuple[int, ...]


def difference(before: Rendered, after: Rendered) -> Difference:
    """Kept, moved, removed and inserted segments, matched by their ids.

    The kept ones are a heaviest common subsequence by tokens, in O(m log n) for m pairs of equal segments.
    """
    same = common_prefix(before.segment_ids(), after.segment_ids())  # of a heaviest one
    rest = _heaviest(before.segments[same:], after.segments[same:])
    kept = [*[(i, i) for i in range(same)], *[(same + i, same + j) for i, j in rest]]
    old = set(range(len(before.segments))) - {i for i, _ in kept}
    new = set(range(len(after.segments))) - {j for _, j in kept}
    waiting: dict[str, list[int]] = defaultdict(list)
    for j in sorted(new, reverse=True):
        waiting[after.segments[j].id].append(j)
    moved = [(i, here.pop()) for i in sorted(old) if (here := waiting[before.segments[i].id])]
    return Difference(
        tuple(kept),
        tuple(moved),
        tuple(sorted(old - {i for i, _ in moved})),
        tuple(sorted(new - {j for _, j in moved})),
    )


def _heaviest(before: Sequence[Segment], after: Sequence[Segment]) -> list[tuple[int, int]]:
    """Pairs (i, j) of equal segments, increasing in both, with the most tokens in total."""
    places: dict[str, list[int]] = defaultdict(list)
    for j, segment in enumerate(after):
        places[segment.id].append(j)
    # the ends of the best chains so far, increasing in j and in weight: bisection finds the best before j
    ends: list[int] = []
    weights: list[int] = []
    chains: list[tuple[tuple[int, int], object]] = []
    for i, segment in enumerate(before):
        for j in reversed(places[segment.id]):  # the last first, so that no chain has a segment twice
            first, beyond = bisect_left(ends, j), bisect_right(ends, j)
            weight = (weights[first - 1] if first else 0) + segment.num_tokens
            if beyond and weights[beyond - 1] >= weight:
                continue
            last = bisect_right(weights, weight, first)
            chain = ((i, j), chains[first - 1] if first else None)
            ends[first:last], weights[first:last], chains[first:last] = [j], [weight], [chain]
    out: list[tuple[int, int]] = []
    node: object = chains[-1] if chains else None
    while isinstance(node, tuple):
        pair, node = node
        out.append(pair)
    return out[::-1]

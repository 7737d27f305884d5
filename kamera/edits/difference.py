"""Differences of two renderings of a conversation."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.content import Rendered, Segment, common_prefix
from kamera.edits.directive import Directive, Mode


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

    @property
    def appended_only(self) -> bool:
        """True if the prompt before is a prefix of the one after."""
        return not self.removed and not self.moved and all([i == j for i, j in self.kept])


def difference(before: Rendered, after: Rendered) -> Difference:
    """Kept, moved, removed and inserted segments, matched by their ids.

    The kept ones are a heaviest common subsequence by tokens, in O(m log n) for m pairs of equal segments.
    """
    same = common_prefix(before.segment_ids(), after.segment_ids())  # of a heaviest one
    rest = _heaviest(before.segments[same:], after.segments[same:])
    kept = [*[(i, i) for i in range(same)], *[(same + i, same + j) for i, j in rest]]
    old = set(range(len(before.segments))) - {i for i, _ in kept}
    new = set(range(len(after.segments))) - {j for _, j in kept}
    moved = []
    waiting: dict[str, list[int]] = defaultdict(list)
    for j in sorted(new, reverse=True):
        waiting[after.segments[j].id].append(j)
    for i in sorted(old):
        here = waiting[before.segments[i].id]
        if here:
            moved.append((i, here.pop()))
    return Difference(
        tuple(kept),
        tuple(moved),
        tuple(sorted(old - {i for i, _ in moved})),
        tuple(sorted(new - {j for _, j in moved})),
    )


def directives(before: Rendered, after: Rendered, mode: Mode = "repair") -> tuple[Directive, ...]:
    """Directives, in segments, that turn ``before`` into ``after``.

    A moved segment is removed at its old position and inserted as a replacement at its new one; `difference`
    names such segments for callers that hold their KV.
    """
    pairs = [*difference(before, after).kept, (len(before.segments), len(after.segments))]
    out = []
    i = j = 0
    for next_i, next_j in pairs:
        if i < next_i or j < next_j:
            ids = [t for s in after.segments[j:next_j] for t in after.tokens(s).tolist()]
            out.append(Directive(i, next_i, ids, mode, "segments"))
        i, j = next_i + 1, next_j + 1
    return tuple(out)


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
        found = []
        for j in places[segment.id]:
            at = bisect_right(ends, j - 1)
            weight = (weights[at - 1] if at else 0) + segment.num_tokens
            found.append((j, weight, ((i, j), chains[at - 1] if at else None)))
        for j, weight, chain in found:  # all looked up before any is entered, so that a segment is used once
            at = bisect_right(ends, j)
            if at and weights[at - 1] >= weight:
                continue
            last = at
            while last < len(ends) and weights[last] <= weight:
                last += 1
            first = at - 1 if at and ends[at - 1] == j else at
            ends[first:last], weights[first:last], chains[first:last] = [j], [weight], [chain]
    out: list[tuple[int, int]] = []
    node: object = chains[-1] if chains else None
    while isinstance(node, tuple):
        pair, node = node
        out.append(pair)
    return out[::-1]


def is_permutation(before: Rendered, after: Rendered) -> bool:
    """True if both hold the same segments equally often, in any order."""
    return Counter(before.segment_ids()) == Counter(after.segment_ids())

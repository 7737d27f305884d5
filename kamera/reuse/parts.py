"""Parts of a prompt that equal parts of earlier ones: which of them are taken, where they overlap."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from kamera.reuse.prompt import Prompt
from kamera.reuse.table import Content


class Part(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt equal those of a node's segment from ``offset`` on."""

    start: int
    stop: int
    node: int
    offset: int

    def clip(self, low: int, high: int) -> Part:
        """The part within ``low`` to ``high``, empty or less (``stop <= start``) if it is outside."""
        start = max(self.start, low)
        return Part(start, min(self.stop, high), self.node, self.offset + start - self.start)


@dataclass(eq=False)
class Text:
    """A prompt, with the limits of its texts: nothing is compared across a picture's edge."""

    prompt: Prompt

    @cached_property
    def starts(self) -> list[int]:
        """Starts of pictures, in order."""
        return [one.start for one in self.prompt.media]

    @cached_property
    def stops(self) -> list[int]:
        """Stops of pictures, in order."""
        return [one.stop for one in self.prompt.media]

    def text_end(self, at: int) -> int:
        """Where the text that holds token ``at`` ends."""
        index = bisect_left(self.starts, at)
        return self.starts[index] if index < len(self.starts) else len(self.prompt)

    def opening(self, at: int) -> int:
        """Where the text that ends at ``at``, or goes on there, begins."""
        index = bisect_right(self.stops, at)
        return self.stops[index - 1] if index else 0

    def plain(self, start: int, stop: int) -> bool:
        """True if no token of ``start`` to ``stop`` is a picture's."""
        index = bisect_left(self.starts, stop)
        return not index or self.stops[index - 1] <= start

    def picture(self, *, start: int = -1, stop: int = -1) -> tuple[int, int, Content] | None:
        """The picture that starts, or stops, there: its tokens and content."""
        places, at = (self.starts, start) if stop < 0 else (self.stops, stop)
        index = bisect_left(places, at)
        if index == len(places) or places[index] != at:
            return None
        one = self.prompt.media[index]
        return one.start, one.stop, Content(self.prompt.slice(one.start, one.stop), one.digest)


def choose_parts(parts: Sequence[Part]) -> list[Part]:
    """Those parts, none over another, that have the most tokens together, in order."""
    by_stop = sorted({(p.start, p.stop): p for p in parts}.values(), key=attrgetter("stop"))
    stops = [p.stop for p in by_stop]
    best = [0]  # of the first n parts, the most tokens
    for i, part in enumerate(by_stop):
        best.append(max(best[i], best[bisect_right(stops, part.start, 0, i)] + part.stop - part.start))
    out: list[Part] = []
    i = len(by_stop)
    while i:
        if best[i] == best[i - 1]:
            i -= 1
            continue
        out.append(by_stop[i - 1])
        i = bisect_right(stops, out[-1].start, 0, i - 1)
    return out[::-1]


def fill_gaps(taken: Sequence[Part], parts: Sequence[Part], first: int, last: int) -> list[Part]:
    """``taken``, and ``parts`` clipped to the gaps between them, ``first`` and ``last``, in order."""
    rest = iter(sorted(parts))
    part, far = next(rest, None), Part(first, first, 0, 0)
    out: list[Part] = []
    at = first
    for one in (*taken, Part(last, last, 0, 0)):
        while at < one.start:
            while part is not None and part.start <= at:
                far = max(far, part, key=attrgetter("stop"))
                part = next(rest, None)
            if far.stop > at:
                out.append(far.clip(at, one.start))
                at = out[-1].stop
            else:
                at = one.start if part is None else min(one.start, part.start)
        if one.stop > one.start:
            out.append(one)
        at = one.stop
    return out


def divide(parts: Sequence[Part], edges: Sequence[int]) -> list[Part]:
    """The parts, none of them across an edge (ascending)."""
    out: list[Part] = []
    for part in parts:
        inner = edges[bisect_right(edges, part.start) : bisect_left(edges, part.stop)]
        borders = itertools.pairwise([part.start, *inner, part.stop])
        out += [part.clip(low, high) for low, high in borders]
    return out

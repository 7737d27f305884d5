"""A rendered conversation is cut where parts of its texts came before, so that these are segments again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

from kamera.content import Extent, Rendered
from kamera.reuse.discovery import Discovery
from kamera.reuse.prompt import Media, Prompt


class Recut(NamedTuple):
    """A conversation as it is cut. ``prompt`` is its stable part as an index sees it, between ``cuts``.

    ``again`` are the extents that came before behind other tokens.
    """

    rendered: Rendered
    prompt: Prompt
    again: frozenset[Extent]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The borders of the segments, both ends among them."""
        return (0, *[segment.stop for segment in self.rendered.segments])


def recut(
    rendered: Rendered, discovery: Discovery, first: int, known: Collection[str] = frozenset()
) -> Recut:
    """The conversation with what came before as segments of their own, from token ``first`` on.

    No segment goes across the edge of a text. Texts whose ids are ``known``, and media, stay as they are.
    """
    texts = [s for s in rendered.segments if s.media is None and s.start >= first]
    own = [(s.start, s.stop) for s in texts if s.id in known]
    edges = {first, *(edge for extent in (*rendered.texts, *own) for edge in extent)}
    media = [Media(s.start, s.stop, s.media) for s in rendered.segments if s.media is not None]
    prompt = Prompt.of(rendered.ids[: rendered.stable].numpy(), media=media)
    matches = discovery.find(prompt, sorted(edges))
    starts = [start for start, _ in own]

    def free(start: int) -> bool:
        at = bisect_right(starts, start)
        return start >= first and not (at and start < own[at - 1][1])

    extents = sorted([*own, *[extent for extent in matches.kept if free(extent[0])]])
    hits = frozenset([(start, stop) for start, stop, *_ in matches.hits])
    return Recut(rendered.recut(extents), prompt, hits)

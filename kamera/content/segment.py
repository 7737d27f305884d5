"""A rendered conversation, and the segments it is cut into."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import torch

from kamera.content.borders import common_prefix
from kamera.content.media_tokens import ProcessedMedia
from kamera.forks import lazy
from kamera.ops import digest

SegmentKind = Literal["text", "image", "video"]
"""What a segment holds."""

Extent = tuple[int, int]
"""Tokens [start, stop)."""


def segment_id(role: str, kind: SegmentKind, media: str | None, ids: Sequence[int]) -> str:
    """The id of a segment with these tokens; see `Segment`."""
    return digest("kamera.segment.v1", role, kind, media or "", struct.pack(f"<{len(ids)}I", *ids))


@dataclass(frozen=True)
class Segment:
    """A span of a rendered conversation that is stored and moved as a whole.

    Tokens ``start:stop`` of `Rendered.ids`. ``messages`` is the span of messages it renders, as indices
    [first, last + 1): more than one if the template merges messages, and an empty span at 0 for tokens that
    the template adds by itself. ``role`` is that of the first (``""`` for the template's own). ``media`` is
    the digest of its picture or clip, None for text. ``id`` is a digest of the tokens, the media and the
    role: equal content in the same role has one id at every position.
    """

    id: str
    start: int
    stop: int
    kind: SegmentKind
    role: str
    messages: tuple[int, int]
    media: str | None = None

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation as tokens.

    ``ids`` int64 ``[tokens]``: the whole conversation after chat template and processor, the generation
    prompt included. ``segments`` cover ``ids`` without a gap up to ``stable``; the tokens after it are the
    generation prompt, which the next turn may render differently. ``turns`` are the token spans of turns,
    ``tags`` those of the template's tokens that open and close them, ``texts`` those of text between turns,
    closing tags and media. ``cuts`` are the borders inside of texts that were cut anew (`recut`), counted
    from where the text begins, by the id that it has as one segment. ``media`` are its pictures and clips, by
    digest, ``types`` the processor's per-token inputs ``[tokens]`` of a prompt with media. If it is
    ``anchored``, windows have its system prompt as their anchor; else that is content as any other, which may
    have come before behind other tokens, and the anchor is the tag in front of it.
    """

    ids: torch.Tensor
    segments: tuple[Segment, ...]
    stable: int
    turns: tuple[Extent, ...] = ()
    tags: tuple[Extent, ...] = ()
    texts: tuple[Extent, ...] = ()
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    media: Mapping[str, ProcessedMedia] = field(default_factory=dict)
    types: Mapping[str, torch.Tensor] = field(default_factory=dict)
    anchored: bool = True

    @property
    def num_tokens(self) -> int:
        """Length in tokens, generation prompt included."""
        return int(self.ids.shape[0])

    def segment_ids(self) -> tuple[str, ...]:
        """Ids of the segments in order."""
        return tuple([segment.id for segment in self.segments])

    def tokens(self, segment: Segment) -> torch.Tensor:
        """Token ids of a segment, int64 ``[tokens]``."""
        return self.ids[segment.start : segment.stop]

    def inputs(self, segment: Segment) -> dict[str, torch.Tensor]:
        """The model inputs of a segment beside its ids; none of a text."""
        if segment.media is None:
            return {}
        types = {name: values[segment.start : segment.stop] for name, values in self.types.items()}
        return {**self.media[segment.media].inputs, **types}

    def without_media(self) -> Rendered:
        """The conversation without pixels, to be compared with others."""
        return replace(self, media={}, types={})

    def recut(self, kept: Sequence[Extent]) -> Rendered:
        """The conversation with the ``kept`` extents as segments: in order, apart, each inside of one text.

        A border inside of one goes. Tokens, media and the edges of texts stay as they are.
        """
        segments, cuts = list[Segment](), dict(self.cuts)
        starts = [start for start, _ in kept]
        at = 0
        for text in self.texts:
            first, last = self._segments_in(text)
            segments += self.segments[at:first]
            at, parts = last, self.segments[first:last]
            extents = kept[bisect_left(starts, text[0]) : bisect_left(starts, text[1])]
            borders = {s.start for s in parts}
            for low, high in extents:
                borders.difference_update(range(low + 1, high))
                borders.update((low, high))
            inner = sorted(borders - set(text))
            if inner != [s.start for s in parts[1:]]:
                cuts[self._text_id(text)] = tuple([border - text[0] for border in inner])
                parts = tuple([self._segment(parts, *part) for part in pairwise([text[0], *inner, text[1]])])
            segments += parts
        return replace(self, segments=(*segments, *self.segments[at:]), cuts=cuts)

    def cut_as(self, before: Rendered) -> Rendered:
        """The conversation with the texts that ``before`` has too, and what both begin with, cut as there."""
        if not before.cuts:
            return self
        same = common_prefix(self.ids.tolist(), before.ids.tolist())
        extents: list[Extent] = []
        for start, stop in self.texts:
            inner = before.cuts.get(self._text_id((start, stop)))
            if inner is not None:
                extents += pairwise([start, *[start + border for border in inner], stop])
            elif start < same:
                first, last = before._segments_in((start, min(stop, same)))
                extents += [
                    (s.start, s.stop) for s in before.segments[first:last] if s.stop <= min(stop, same)
                ]
        return self.recut(extents)

    def of_messages(self, first: int, last: int) -> tuple[int, int]:
        """Span of the segments that render the messages ``first:last``, as indices [start, stop).

        Raises `ValueError` for messages that share a segment with others: the template merges them.
        """
        indices = [i for i, s in enumerate(self.segments) if s.messages[0] < last and first < s.messages[1]]
        if not indices:
            raise ValueError(f"messages {first}:{last} render to no tokens of their own")
        spans = [self.segments[i].messages for i in indices]
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        if low < first or high > last:
            raise ValueError(
                f"the chat template renders messages {low}:{high} in one piece: give that span in place of "
                f"{first}:{last}"
            )
        return indices[0], indices[-1] + 1

    # -- inside --------------------------------------------------------------------------------

    def _segments_in(self, text: Extent) -> tuple[int, int]:
        """The segments that begin in a text, as indices [first, last + 1)."""
        return bisect_left(self._starts, text[0]), bisect_left(self._starts, text[1])

    @lazy
    def _starts(self) -> list[int]:
        return [segment.start for segment in self.segments]

    def _text_id(self, text: Extent) -> str:
        """The id of a text as one segment."""
        whole = self.segments[self._segments_in(text)[0]]
        return segment_id(whole.role, "text", None, self.ids[text[0] : text[1]].tolist())

    def _segment(self, among: Sequence[Segment], start: int, stop: int) -> Segment:
        """The segment ``start:stop`` of a text that is cut into ``among``."""
        original = next((s for s in among if (s.start, s.stop) == (start, stop)), None)
        name = segment_id(among[0].role, "text", None, self.ids[start:stop].tolist())
        return original or replace(among[0], id=name, start=start, stop=stop)

"""A rendered conversation, and the segments it is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

SegmentKind = Literal["text", "image", "video"]
"""What a segment holds."""


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
    ``tags`` those of the template's tokens that open and close them.
    """

    ids: torch.Tensor
    segments: tuple[Segment, ...]
    stable: int
    turns: tuple[tuple[int, int], ...] = ()
    tags: tuple[tuple[int, int], ...] = ()

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

    def of_messages(self, first: int, last: int) -> tuple[int, int]:
        """Span of the segments that render the messages ``first:last``, as indices [start, stop).

        Raises `ValueError` for messages that share a segment with others: the template merges them.
        """
        found = [i for i, s in enumerate(self.segments) if s.messages[0] < last and first < s.messages[1]]
        if not found:
            raise ValueError(f"messages {first}:{last} render to no tokens of their own")
        spans = [self.segments[i].messages for i in found]
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        if low < first or high > last:
            raise ValueError(
                f"the chat template renders messages {low}:{high} in one piece: give that span in place of "
                f"{first}:{last}"
            )
        return found[0], found[-1] + 1

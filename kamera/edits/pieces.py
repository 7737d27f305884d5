"""A prompt after edits, as pieces: unchanged segments, and new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera.content import Rendered
from kamera.edits.directive import Edit


@dataclass(frozen=True)
class Kept:
    """Segment ``index`` of the prompt before the edits, unchanged."""

    index: int


@dataclass(frozen=True)
class Fresh:
    """Tokens that are not a segment of the prompt before: a replacement, or the rest of a cut segment."""

    ids: tuple[int, ...]


Piece = Kept | Fresh
"""A part of a prompt after its edits: tokens of a segment that stays, or new ones."""


def pieces(rendered: Rendered, edits: Sequence[Edit]) -> tuple[Piece, ...]:
    """The stable part of ``rendered`` after ``edits`` (in order, not overlapping), in order.

    Their concatenated tokens are the prompt's with each edited span replaced; adjacent tokens outside of kept
    segments are one piece.
    """
    out: list[Piece] = []

    def fresh(ids: Sequence[int]) -> None:
        if not ids:
            return
        if out and isinstance(out[-1], Fresh):
            out[-1] = Fresh((*out[-1].ids, *ids))
        else:
            out.append(Fresh(tuple(ids)))

    tokens = rendered.ids.tolist()
    rest = list(edits)
    for index, segment in enumerate(rendered.segments):
        at = segment.start
        while rest and rest[0].start < segment.stop:
            edit = rest[0]
            fresh(tokens[at : max(at, edit.start)])
            if edit.start >= segment.start:
                fresh(edit.replacement)
            at = max(at, min(edit.stop, segment.stop))
            if edit.stop > segment.stop:
                break
            rest.pop(0)
        if at == segment.start and not any(_inside(e, segment.start, segment.stop) for e in edits):
            out.append(Kept(index))
        else:
            fresh(tokens[at : segment.stop])
    for edit in rest:
        if edit.start == rendered.stable:
            fresh(edit.replacement)
    return tuple(out)


def _inside(edit: Edit, start: int, stop: int) -> bool:
    """True if an edit changes tokens of ``start:stop``, or inserts between two of them."""
    if edit.start < edit.stop:
        return edit.start < stop and start < edit.stop
    return start < edit.start < stop

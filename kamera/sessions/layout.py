"""Which segments of a prompt stand in which slots of a window, and what a new prompt needs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera.content import LONGEST, Rendered, Segment
from kamera.edits import difference

Run = tuple[int, int]
"""Neighbouring segments of a prompt that are one chunk: the first, and the one behind the last."""

Piece = tuple[Run, int | None]
"""A run, and the slot that holds it."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt, and the runs of its segments that a window's slots hold, in order."""

    prompt: Rendered
    runs: tuple[Run, ...]


def question(prompt: Rendered) -> int:
    """Where the tokens begin that are asked behind the window: at the generation prompt.

    Where the template writes none, the last segment is asked.
    """
    return prompt.stable if prompt.stable < prompt.num_tokens else prompt.segments[-1].start


def anchor_segments(prompt: Rendered) -> int:
    """How many segments in front are the template's own or a system message's text."""
    count = 0
    for segment in prompt.segments:
        if segment.role not in ("", "system", "developer") or segment.media is not None:
            break
        count += 1
    return count


def anchor_ids(prompt: Rendered) -> tuple[str, ...]:
    """Ids of those segments."""
    return prompt.segment_ids()[: anchor_segments(prompt)]


def laid_out(prompt: Rendered, before: Layout | None, *, join: bool) -> list[Piece]:
    """The runs of ``prompt`` between its anchor and its question, each with its slot if it has one.

    ``join``: behind the first change neighbouring texts are one run of `LONGEST` tokens at most, and have no
    slot. That is for a window that prefills them anyway: one forward is less than one for each.
    """
    first, stop = anchor_segments(prompt), question(prompt)
    standing = {} if before is None else _standing(before, prompt)
    out: list[Piece] = []
    index = first
    while index < len(prompt.segments) and prompt.segments[index].start < stop:
        slot, last = standing.get(index, (None, index + 1))
        out.append(((index, last), slot))
        index = last
    return _joined(prompt.segments, out) if join else out


def _standing(before: Layout, prompt: Rendered) -> dict[int, tuple[int, int]]:
    """Slot and end of the run, by the segment of the new prompt that it begins with."""
    change = difference(before.prompt, prompt)
    goes = dict((*change.kept, *change.moved))
    found = {}
    for slot, (start, stop) in enumerate(before.runs):
        there = goes.get(start)
        if there is not None and all(goes.get(start + n) == there + n for n in range(stop - start)):
            found[there] = (slot, there + stop - start)
    return found


def _joined(segments: Sequence[Segment], pieces: list[Piece]) -> list[Piece]:
    same = 0
    while same < len(pieces) and pieces[same][1] == same:
        same += 1
    out = pieces[:same]
    open_run = False
    for (start, stop), slot in pieces[same:]:
        if any(s.media is not None for s in segments[start:stop]):
            out.append(((start, stop), slot))
            open_run = False
            continue
        for index in range(start, stop):
            begin = out[-1][0][0] if open_run else index
            if open_run and segments[index].stop - segments[begin].start <= LONGEST:
                out[-1] = ((begin, index + 1), None)
            else:
                out.append(((index, index + 1), None))
            open_run = True
    return out

"""A stream of pictures, a question a turn about the last few, and what only the right KV answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.testbed import World
from kamera.testbed.frames import Frame
from kamera.testbed.world import answer_with_frames, question_text

HELD_OUT = 970_000
"""Seed of the streams; the backbone was trained from 1 000 000."""
FRAMES = ("LLILRLIL", "LRILLILL")
"""Layouts, taken in turn: legends, renames and items frames (at most three of those fit an episode)."""


@dataclass(frozen=True)
class Turn:
    """The picture that comes, and a question behind the pictures that are then in view.

    ``bound``: what it asks about is shown by a picture that came before the last one, and another picture
    still in view decides the answer. What has left would not have changed it.
    """

    frame: Frame
    text: str
    answer: str
    bound: bool


def stream(turns: int, keep: int, seed: int) -> list[Turn]:
    """``turns`` pictures, of which the last ``keep`` are in view."""
    world, frames, draw = World(HELD_OUT + seed), list[Frame](), random.Random(seed)
    while len(frames) < turns:
        index = len(frames) // len(FRAMES[0])
        frames += world.episode(index, layout=FRAMES[index % len(FRAMES)]).frames
    return [_turn(frames[: seen + 1], keep, draw) for seen in range(turns)]


def _turn(shown: Sequence[Frame], keep: int, draw: random.Random) -> Turn:
    view = list(shown[-keep:])
    tags = Counter(tag for frame in view for tag in frame.glyph_of)
    old = {tag for frame in view[:-1] for tag in frame.glyph_of}
    bound, other = list[tuple[str, int, str]](), list[tuple[str, int, str]]()
    for tag in sorted(tag for tag, count in tags.items() if count == 1):
        found, ever = answer_with_frames(view, "value", tag), answer_with_frames(shown, "value", tag)
        if found is not None and ever is not None and found[0] == ever[0]:
            into = bound if tag in old and len(found[1]) > 1 else other
            into.append(("value", tag, found[0]))
    for glyph in sorted({glyph for frame in view for glyph in frame.colour_of}):
        found = answer_with_frames(view, "colour", glyph)
        other += [] if found is None else [("colour", glyph, found[0])]
    kind, subject, answer = draw.choice(bound or other)
    return Turn(shown[-1], question_text(kind, subject), answer, bool(bound))

"""A stream of frames, and questions about what stays, what a departure changed, and what has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kamera import testbed

HELD_OUT = 970_000
"""Seed of the streams; backbones were trained from 1 000 000."""

FRAMES = ("LLILRLIL", "LRILLILL")
"""Layouts, taken in turn: legends, renames and items frames (at most three of those fit an episode)."""

Kind = Literal["stays", "changed", "left"]
KINDS: tuple[Kind, ...] = ("stays", "changed", "left")


@dataclass(frozen=True)
class Asked:
    """A question at a moment of a stream.

    ``truth`` is the answer by the window for "stays" and "changed" (those whose answer by all frames so far
    is another), and by all frames so far for "left" (questions that no frame in view answers).
    """

    text: str
    truth: str
    kind: Kind


def questions(episode: testbed.Episode, seen: int, window: int, most: int, seed: int) -> list[Asked]:
    """At most ``most`` questions of each kind once ``seen`` frames were shown and ``window`` are in view."""
    shown, view = list(range(seen)), list(range(max(0, seen - window), seen))
    found: dict[Kind, list[Asked]] = {kind: [] for kind in KINDS}
    for kind, subject in dict.fromkeys(episode.subjects()):
        every = _answer(episode, kind, subject, shown)
        now = _answer(episode, kind, subject, view)
        if every is None:
            continue
        text, whole = every
        if now is None:
            found["left"].append(Asked(text, whole, "left"))
        elif now[1] == whole:
            found["stays"].append(Asked(text, whole, "stays"))
        else:
            found["changed"].append(Asked(text, now[1], "changed"))
    rng = np.random.default_rng([seed, episode.index, seen])
    return [some[i] for some in found.values() for i in rng.permutation(len(some))[:most]]


def _answer(
    episode: testbed.Episode, kind: str, subject: int, order: Sequence[int]
) -> tuple[str, str] | None:
    try:
        question = episode.ask(kind, subject, order)
    except ValueError:  # nothing in view shows the subject
        return None
    return question.text, question.answer

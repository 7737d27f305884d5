"""Items of the testbed's world: legends and renames, then an items frame whose tags they give colours.

In this world a later frame overrides an earlier one, so every donor changes what the items frame means.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kamera import testbed
from kamera.eval.tasks.sample import Picture, TaskSample

HELD_OUT = 940_000
"""Seed of the episodes; the shipped backbone was trained from a million on."""

WINDOWS = ("LLLI", "LRLI", "LLRLI", "LRLLI")
DONORS = "LRLL"


def read(count: int, seed: int = 0) -> Iterator[TaskSample]:
    """``count`` items, one an episode: a question that needs the items frame and frames before it."""
    world = testbed.World(HELD_OUT + seed)
    for index in range(count):
        shown = WINDOWS[index % len(WINDOWS)]
        # a picture that states no fact, then the donors, then the window itself
        episode = world.episode(index, layout=f"P{DONORS}{shown}")
        order = list(range(1 + len(DONORS), 1 + len(DONORS) + len(shown)))
        pictures = [Picture(frame.image, caption=frame.caption) for frame in episode.frames]
        asked = [episode.ask("value", tag, order=order) for tag in episode.frames[order[-1]].glyph_of]
        bound = [question for question in asked if question.bound]
        question = bound[int(np.random.default_rng([HELD_OUT + seed, index]).integers(len(bound)))]
        yield TaskSample(
            id=f"testbed/{seed}/{index}",
            task=f"{question.hops} hops",
            parts=tuple(pictures[frame] for frame in order),
            question=question.text,
            answer=question.answer,
            meta={"rule": "words", "hops": question.hops, "max_new_tokens": 1},
            others=(*pictures[1 : 1 + len(DONORS)], pictures[0]),
        )

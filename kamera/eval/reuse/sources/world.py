"""Items of the testbed's world: legends and renames, then an items frame whose tags they give colours.

In this world a later frame overrides an earlier one, so every donor changes what the items frame means.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kamera import testbed
from kamera.eval.reuse.item import Item
from kamera.eval.tasks.sample import Picture

HELD_OUT = 940_000
"""Seed of the episodes; the shipped backbone was trained from a million on."""

WINDOWS = ("LLLI", "LRLI", "LLRLI", "LRLLI")
DONORS = "LRLL"
FILLER = "filler"


def read(count: int, seed: int = 0) -> Iterator[Item]:
    """``count`` items, one an episode: a question that needs the items frame and frames before it."""
    world = testbed.World(HELD_OUT + seed)
    for index in range(count):
        shown = WINDOWS[index % len(WINDOWS)]
        size = len(shown)
        # a picture that states no fact, then the donors, then the window itself
        episode = world.episode(index, layout=f"P{DONORS}{shown}")
        order = list(range(1 + len(DONORS), 1 + len(DONORS) + size))
        pictures = [Picture(frame.image, caption=frame.caption) for frame in episode.frames]
        units = {f"u{i}": pictures[frame] for i, frame in enumerate(order)}
        units |= {f"donor-{i}": pictures[1 + i] for i in range(len(DONORS))}
        units[FILLER] = pictures[0]
        asked = [episode.ask("value", tag, order=order) for tag in episode.frames[order[-1]].glyph_of]
        bound = [question for question in asked if question.bound]
        question = bound[int(np.random.default_rng([HELD_OUT + seed, index]).integers(len(bound)))]
        yield Item(
            id=f"testbed/{seed}/{index}",
            source="testbed",
            task=f"{question.hops} hops",
            units=units,
            window=tuple(f"u{i}" for i in range(size)),
            question=question.text,
            answer=question.answer,
            max_new_tokens=1,
            meta={"rule": "words", "hops": question.hops},
        )

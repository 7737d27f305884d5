"""Frames of the synthetic world as a probe: legends that contradict each other, and items that they bind."""

from __future__ import annotations

import numpy as np

from kamera import testbed
from kamera.certify.probe import ORDERS, READER, TRIALS, ProbeScene, ReaderFact, draw_queries

LAYOUT = "LLLIL"
"""Legends, and the items frame in the reader's place."""


def draw_scene(seed: int, index: int) -> ProbeScene:
    """The scene of number ``index``, asking for values of items and colours on which legends disagree."""
    episode = testbed.World(seed).episode(index, layout=LAYOUT)
    tags = list(episode.frames[READER].glyph_of)

    asked = {behind: [episode.ask("value", tag, behind) for tag in tags] for behind in ORDERS}
    readings = {
        behind: {question.text: ReaderFact(question.answer, question.bound) for question in questions}
        for behind, questions in asked.items()
    }
    order = TRIALS["patched"][1]
    said: dict[int, set[int]] = {}
    for frame in (episode.frames[i] for i in order):
        for glyph, colour in frame.colour_of.items():
            said.setdefault(glyph, set()).add(colour)
    disputed = [episode.ask("colour", glyph, order) for glyph, colours in said.items() if len(colours) > 1]
    contested = {question.text: question.answer for question in disputed}
    queries = draw_queries(np.random.default_rng([seed, index]), readings, contested, testbed.COLOURS)
    return ProbeScene(testbed.SYSTEM, tuple(frame.content for frame in episode.frames), queries)

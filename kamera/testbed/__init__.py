"""A synthetic visual world and a small trained backbone that binds across its frames.

>>> from kamera import testbed
>>> model, processor = testbed.load()
>>> episode = testbed.World(seed=0).episode(0, legends=3)
>>> question = episode.questions[0]
>>> question.text, question.answer
('value of tag 37?', 'green')
>>> episode.answer(question, order=[3, 0, 1, 2])      # the truth when the legends come too late
'olive'

How it was trained, what it answers and three more families: ``lab/testbed/MODEL_CARD.md`` of the repository.
"""

from .directories import load, weights_dir
from .frames import COLOURS, GLYPHS, TAGS, Frame
from .video import read_frames, render_video
from .world import Episode, Question, World, answer

SYSTEM = "You watch a camera."
"""The system prompt the measurements are made with."""

__all__ = [
    "COLOURS",
    "GLYPHS",
    "SYSTEM",
    "TAGS",
    "Episode",
    "Frame",
    "Question",
    "World",
    "answer",
    "load",
    "read_frames",
    "render_video",
    "weights_dir",
]

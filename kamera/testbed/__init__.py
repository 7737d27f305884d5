"""A synthetic visual world and a small trained backbone that binds across its frames.

>>> from kamera import testbed
>>> model, processor = testbed.load()
>>> episode = testbed.World(seed=0).episode(0, legends=3)
>>> question = episode.questions[0]
>>> question.text, question.answer
('value of tag 37?', 'green')
>>> episode.answer(question, order=[3, 0, 1, 2])      # the answer if the legends come too late
'olive'

``benchmarks/testbed`` in the repository trains it, its ``metrics.json`` gives its accuracy.
"""

from typing import Any

import torch

from kamera.engines.hf import SHIPPED, load_model, load_processor, weights_dir

from .frames import COLOURS, GLYPHS, TAGS, Frame
from .video import read_frames, render_video
from .world import Episode, Question, World, answer

SYSTEM = "You watch a camera."
"""System prompt of the measurements."""


def load(*, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model and processor of ``Backbone.from_pretrained("testbed")``; no network, no torchvision."""
    return load_model(SHIPPED, dtype=dtype), load_processor(SHIPPED)


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

"""The synthetic world: frames that bind across chunks, questions about them, and the truth.

A *legend* frame shows glyphs painted in colours. An *items* frame shows white glyphs, each with a
two-digit tag. The value of an item is the colour of its glyph in the latest legend shown before
the items frame, or the glyph's default colour if no legend before it shows the glyph. So the
meaning of an items frame depends on its antecedents and on their order, which is what a KV cache
that was computed out of context cannot know. A *picture* frame is a distractor.

Everything is drawn from `numpy.random.default_rng([seed, index])`: the same seed and index give
the same episode, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

GLYPHS: tuple[str, ...] = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"),
    *("iota", "kappa", "lambda", "mu", "nu", "xi", "omicron", "pi"),
    *("rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
COLOURS: tuple[str, ...] = (
    *("red", "green", "blue", "yellow", "cyan", "magenta", "orange", "purple"),
    *("pink", "brown", "lime", "teal", "navy", "olive", "salmon", "gray"),
)
TAGS: tuple[str, ...] = tuple(str(number) for number in range(10, 100))
DEFAULTS: tuple[int, ...] = tuple((5 * glyph + 3) % len(COLOURS) for glyph in range(len(GLYPHS)))
"""The colour of each glyph when no legend shows it."""

LEGEND_GRID, LEGEND_GLYPHS, LEGEND_REPEAT = 6, 12, 3
ITEMS_GRID, ITEM_SIDE, ITEMS_SHOWN = 12, 2, 30
PICTURE_GRID = 6
MAX_ITEMS_FRAMES = len(TAGS) // ITEMS_SHOWN
BLANK = -1

TRAINING_SEEDS = 1_000_000
"""Worlds with a seed at or above this one were trained on; every seed below is held out."""

Cells = tuple[tuple[int, ...], ...]
KINDS = {"L": "legend", "I": "items", "P": "picture"}


@dataclass(frozen=True)
class Frame:
    """One picture of the world.

    `glyphs`, `colours` and `tags` are `[rows][columns]` of indices into `GLYPHS`, `COLOURS` and
    `TAGS`, `BLANK` where a cell has none. One cell is one vision token of the backbone.
    """

    kind: str
    glyphs: Cells
    colours: Cells
    tags: Cells
    texture: int = 0

    @property
    def caption(self) -> str:
        """The text that follows the picture in its chunk, its newline included."""
        return f"{self.kind}\n"

    @cached_property
    def image(self) -> Image:
        """The frame as an RGB picture, 16 pixels to a cell."""
        from .render import draw

        return draw(self)

    @property
    def content(self) -> list[dict[str, Any]]:
        """The frame as a chat content list: the picture, then its caption."""
        return [{"type": "image", "image": self.image}, {"type": "text", "text": self.caption}]

    @cached_property
    def colour_of(self) -> dict[int, int]:
        """Legend: glyph to colour. Empty for other frames."""
        if self.kind != "legend":
            return {}
        return {
            glyph: colour
            for glyphs, colours in zip(self.glyphs, self.colours, strict=True)
            for glyph, colour in zip(glyphs, colours, strict=True)
        }

    @cached_property
    def glyph_of(self) -> dict[int, int]:
        """Items frame: tag to glyph. Empty for other frames."""
        return {
            tag: glyph
            for tags, glyphs in zip(self.tags, self.glyphs, strict=True)
            for tag, glyph in zip(tags, glyphs, strict=True)
            if tag != BLANK
        }


@dataclass(frozen=True)
class Question:
    """A question with its answer in the order of frames it was asked about.

    `kind` is `value` (two hops: tag to glyph in an items frame, glyph to colour in a legend),
    `glyph` (one hop in an items frame) or `colour` (one hop in a legend). `frames` are the indices
    of the frames the answer was read from: a `value` question with one frame fell back to the
    default. `answer` is one token of the testbed's tokenizer.
    """

    text: str
    answer: str
    kind: str
    subject: int
    frames: tuple[int, ...]

    @property
    def hops(self) -> int:
        """2 for `value`, 1 for `glyph` and `colour`."""
        return 2 if self.kind == "value" else 1

    @property
    def bound(self) -> bool:
        """Whether the answer of a two-hop question came from a legend, not from the default."""
        return self.kind == "value" and len(self.frames) == 2


_TEXTS = {"value": "value of tag {}?", "glyph": "glyph of tag {}?", "colour": "colour of glyph {}?"}


def question_text(kind: str, subject: int) -> str:
    """The text of a question of this kind about a tag (`value`, `glyph`) or glyph (`colour`)."""
    return _TEXTS[kind].format((GLYPHS if kind == "colour" else TAGS)[subject])


def _latest(frames: Sequence[Frame], glyph: int) -> int | None:
    """Index of the last of `frames` that is a legend with this glyph."""
    for index in range(len(frames) - 1, -1, -1):
        if glyph in frames[index].colour_of:
            return index
    return None


def resolve(frames: Sequence[Frame], kind: str, subject: int) -> tuple[str, tuple[int, ...]] | None:
    """Answer and the frames it was read from, for frames shown in this order.

    Returns None if nothing in the window shows the subject. Of two items frames with the same tag
    the later one counts.
    """
    if kind == "colour":
        legend = _latest(frames, subject)
        return None if legend is None else (COLOURS[frames[legend].colour_of[subject]], (legend,))
    for index in range(len(frames) - 1, -1, -1):
        glyph = frames[index].glyph_of.get(subject)
        if glyph is None:
            continue
        if kind == "glyph":
            return GLYPHS[glyph], (index,)
        legend = _latest(frames[:index], glyph)
        if legend is None:
            return COLOURS[DEFAULTS[glyph]], (index,)
        return COLOURS[frames[legend].colour_of[glyph]], (legend, index)
    return None


@dataclass(frozen=True)
class Episode:
    """Frames in the order they were shown."""

    frames: tuple[Frame, ...]
    index: int

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """Every question that the frames, shown in this order, answer."""
        return tuple(self.ask(kind, subject) for kind, subject in self.subjects())

    def subjects(self, kinds: Iterable[str] = ("value", "glyph", "colour")) -> list[tuple[str, int]]:
        """(kind, subject) of every question of these kinds that the frames answer."""
        tags = [tag for frame in self.frames for tag in frame.glyph_of]
        shown = sorted({glyph for frame in self.frames for glyph in frame.colour_of})
        return [(kind, subject) for kind in kinds for subject in (shown if kind == "colour" else tags)]

    def ask(self, kind: str, subject: int, order: Sequence[int] | None = None) -> Question:
        """The question about this subject, answered for the frames in `order`.

        Raises ValueError if no frame of the window shows the subject.
        """
        order = range(len(self.frames)) if order is None else order
        found = resolve([self.frames[i] for i in order], kind, subject)
        text = question_text(kind, subject)
        if found is None:
            raise ValueError(f"no frame of {list(order)} answers {text!r}")
        answer, frames = found
        return Question(text, answer, kind, subject, tuple(order[i] for i in frames))

    def answer(self, question: Question, order: Sequence[int] | None = None) -> str | None:
        """Truth for the frames `order` (indices, any order and subset) in the window.

        None if these frames do not answer the question.
        """
        order = range(len(self.frames)) if order is None else order
        return answer([self.frames[i] for i in order], question)


def answer(frames: Sequence[Frame], question: Question) -> str | None:
    """Truth for any frames in any order; None if they do not answer the question."""
    found = resolve(frames, question.kind, question.subject)
    return None if found is None else found[0]


class World:
    """A seeded source of episodes."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    answer = staticmethod(answer)

    def episode(
        self, index: int, legends: int = 3, items: int = 1, pictures: int = 0, layout: str = ""
    ) -> Episode:
        """The `index`-th episode: `legends` legends, then pictures, then items frames.

        `layout` names the frames one by one instead, e.g. `"LILP"`: L legend, I items, P picture.
        Tags are unique in an episode, so at most `MAX_ITEMS_FRAMES` frames show items.
        """
        layout = layout or "L" * legends + "P" * pictures + "I" * items
        if set(layout) - set(KINDS):
            raise ValueError(f"layout {layout!r} has letters other than L, I and P")
        if layout.count("I") > MAX_ITEMS_FRAMES:
            raise ValueError(f"layout {layout!r} has more than {MAX_ITEMS_FRAMES} items frames")
        rng = np.random.default_rng([self.seed, index])
        tags = rng.permutation(len(TAGS))
        frames = []
        for letter in layout:
            if letter == "L":
                frames.append(_legend(rng))
            elif letter == "I":
                frames.append(_items(rng, tags[:ITEMS_SHOWN]))
                tags = tags[ITEMS_SHOWN:]
            else:
                frames.append(_picture(rng))
        return Episode(tuple(frames), index)


def _cells(cells: np.ndarray) -> Cells:
    return tuple(map(tuple, cells.tolist()))


def _legend(rng: np.random.Generator) -> Frame:
    shown = rng.permutation(len(GLYPHS))[:LEGEND_GLYPHS]
    painted = rng.integers(len(COLOURS), size=LEGEND_GLYPHS)
    place = rng.permutation(np.repeat(np.arange(LEGEND_GLYPHS), LEGEND_REPEAT))
    place = place.reshape(LEGEND_GRID, LEGEND_GRID)
    blank = _cells(np.full_like(place, BLANK))
    return Frame("legend", _cells(shown[place]), _cells(painted[place]), blank)


def _items(rng: np.random.Generator, tags: np.ndarray) -> Frame:
    slots = (ITEMS_GRID // ITEM_SIDE) ** 2
    side = ITEMS_GRID // ITEM_SIDE
    tag = np.full(slots, BLANK)
    glyph = np.full(slots, BLANK)
    used = rng.permutation(slots)[: len(tags)]
    tag[used] = tags
    glyph[used] = rng.integers(len(GLYPHS), size=len(tags))
    block = np.ones((ITEM_SIDE, ITEM_SIDE), dtype=int)
    glyphs = np.kron(glyph.reshape(side, side), block)
    tagged = np.kron(tag.reshape(side, side), block)
    return Frame("items", _cells(glyphs), _cells(np.full_like(glyphs, BLANK)), _cells(tagged))


def _picture(rng: np.random.Generator) -> Frame:
    blank = _cells(np.full((PICTURE_GRID, PICTURE_GRID), BLANK))
    return Frame("picture", blank, blank, blank, texture=int(rng.integers(2**31)))

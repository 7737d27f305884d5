"""The synthetic world: episodes of frames that bind across chunks, with questions and answers.

The value of an item is the colour of its glyph. The latest frame before the items frame that mentions the
glyph decides it: a legend gives the colour itself; a rename gives the colour of its target in the latest
legend before the *rename* (three hops through two antecedents). A glyph that no earlier frame mentions has
its default colour. So the meaning of an items frame depends on its antecedents and on their order. KV
computed out of context lacks them, and blind reuse answers fluently and wrongly.

Everything is drawn from `numpy.random.default_rng([seed, index])`: equal seeds and indices give equal
episodes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .frames import COLOURS, DEFAULTS, GLYPHS, ITEMS_SHOWN, KINDS, TAGS, Frame, draw_frame

TRAINING_SEEDS = 1_000_000
"""First seed of the training worlds; every seed below is held out."""

LETTERS = (*KINDS, "l", "r", "i")


@dataclass(frozen=True)
class Question:
    """A question with its answer for one order of frames.

    `kind` is `value` (tag to glyph in an items frame, glyph to colour in what stood before it),
    `glyph` (one hop in an items frame) or `colour` (one hop in a legend), or one of `ORDER_KINDS`,
    which no order-blind reader can answer: `first` (the colour the first legend with a glyph gives it),
    `ago` (how many frames have come since the last one) and `earlier` (which of two glyphs was last
    shown in a legend before the other was). `frames` are the indices of the frames the answer was read
    from, the items frame last: a `value` question with one frame fell back to the default. `answer` is
    one token of the testbed's tokenizer.
    """

    text: str
    answer: str
    kind: str
    subject: int
    frames: tuple[int, ...]
    hops: int

    @property
    def bound(self) -> bool:
        """True if other frames determine the answer of a `value` question, not the default."""
        return self.kind == "value" and len(self.frames) > 1


ORDER_KINDS = ("first", "ago", "earlier")
"""Kinds of questions that ask about the order of frames and nothing else."""

_TEXTS = {
    "value": "value of tag {}?",
    "glyph": "glyph of tag {}?",
    "colour": "colour of glyph {}?",
    "first": "first colour of glyph {}?",
    "ago": "frames since glyph {}?",
}


def question_text(kind: str, subject: int) -> str:
    """The text of a question of this kind about a tag (`value`, `glyph`), a glyph, or a pair of them.

    The subject of `earlier` is `one * len(GLYPHS) + other`.
    """
    if kind == "earlier":
        one, other = divmod(subject, len(GLYPHS))
        return f"earlier of {GLYPHS[one]} and {GLYPHS[other]}?"
    return _TEXTS[kind].format((TAGS if kind in ("value", "glyph") else GLYPHS)[subject])


def legend_of(frames: Sequence[Frame], glyph: int) -> int | None:
    """Index of the last of `frames` that is a legend with this glyph."""
    return next((i for i in range(len(frames) - 1, -1, -1) if glyph in frames[i].colour_of), None)


def value_of(frames: Sequence[Frame], glyph: int) -> tuple[int, tuple[int, ...], int]:
    """The colour of a glyph after `frames`, the frames that determine it, and the number of hops."""
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index]
        if glyph in frame.colour_of:
            return frame.colour_of[glyph], (index,), 1
        if glyph in frame.target_of:
            target = frame.target_of[glyph]
            legend = legend_of(frames[:index], target)
            if legend is None:
                return DEFAULTS[target], (index,), 1
            return frames[legend].colour_of[target], (legend, index), 2
    return DEFAULTS[glyph], (), 0


def answer_with_frames(
    frames: Sequence[Frame], kind: str, subject: int
) -> tuple[str, tuple[int, ...], int] | None:
    """Answer, the frames that determine it and the number of hops, for frames in this order.

    Returns None if no frame of the window shows the subject. The later of two items frames with the same
    tag counts.
    """
    if kind == "colour":
        legend = legend_of(frames, subject)
        return None if legend is None else (COLOURS[frames[legend].colour_of[subject]], (legend,), 1)
    if kind in ORDER_KINDS:
        return _answer_about_order(frames, kind, subject)
    for index in range(len(frames) - 1, -1, -1):
        glyph = frames[index].glyph_of.get(subject)
        if glyph is None:
            continue
        if kind == "glyph":
            return GLYPHS[glyph], (index,), 1
        colour, through, hops = value_of(frames[:index], glyph)
        return COLOURS[colour], (*through, index), 1 + max(hops, 1)
    return None


def _answer_about_order(
    frames: Sequence[Frame], kind: str, subject: int
) -> tuple[str, tuple[int, ...], int] | None:
    """`answer_with_frames` of the kinds that ask for the order itself."""
    if kind == "earlier":
        pair = divmod(subject, len(GLYPHS))
        last = [legend_of(frames, glyph) for glyph in pair]
        if last[0] is None or last[1] is None or last[0] == last[1]:
            return None
        glyph = pair[0] if last[0] < last[1] else pair[1]
        return GLYPHS[glyph], (min(last[0], last[1]), max(last[0], last[1])), 1
    if kind == "first":
        first = next((i for i, frame in enumerate(frames) if subject in frame.colour_of), None)
        return None if first is None else (COLOURS[frames[first].colour_of[subject]], (first,), 1)
    legend = legend_of(frames, subject)
    return None if legend is None else (str(len(frames) - 1 - legend), (legend,), 1)


@dataclass(frozen=True)
class Episode:
    """Frames in their original order."""

    frames: tuple[Frame, ...]
    index: int

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """Every question that the frames in this order answer."""
        return tuple(self.ask(kind, subject) for kind, subject in self.subjects())

    def subjects(self, kinds: Iterable[str] = ("value", "glyph", "colour")) -> list[tuple[str, int]]:
        """(kind, subject) of every question of these kinds that the frames answer."""
        tags = list(dict.fromkeys(tag for frame in self.frames for tag in frame.glyph_of))
        glyphs = sorted({glyph for frame in self.frames for glyph in frame.colour_of})
        last = {glyph: legend_of(self.frames, glyph) for glyph in glyphs}
        pairs = [a * len(GLYPHS) + b for a in glyphs for b in glyphs if last[a] != last[b]]
        about = {"value": tags, "glyph": tags, "earlier": pairs}
        return [(kind, subject) for kind in kinds for subject in about.get(kind, glyphs)]

    def ask(self, kind: str, subject: int, order: Sequence[int] | None = None) -> Question:
        """The question about this subject, answered for the frames in `order`.

        Raises ValueError if no frame of the window shows the subject.
        """
        order = range(len(self.frames)) if order is None else order
        result = answer_with_frames([self.frames[i] for i in order], kind, subject)
        text = question_text(kind, subject)
        if result is None:
            raise ValueError(f"no frame of {list(order)} answers {text!r}")
        answer, frames, hops = result
        return Question(text, answer, kind, subject, tuple(order[i] for i in frames), hops)

    def answer(self, question: Question, order: Sequence[int] | None = None) -> str | None:
        """Correct answer for the frames `order` (indices, any order and subset).

        None if these frames do not answer the question.
        """
        order = range(len(self.frames)) if order is None else order
        return answer([self.frames[i] for i in order], question)


def answer(frames: Sequence[Frame], question: Question) -> str | None:
    """Correct answer for any frames in any order; None if they do not answer the question."""
    result = answer_with_frames(frames, question.kind, question.subject)
    return None if result is None else result[0]


class World:
    """A seeded source of episodes."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def episode(
        self, index: int, legends: int = 3, items: int = 1, pictures: int = 0, layout: str = ""
    ) -> Episode:
        """The `index`-th episode: `legends` legends, then pictures, then items frames.

        `layout` names the frames one by one instead, e.g. `"LRIP"`: L legend, R rename, I items,
        B a large items frame, P picture; l, r and i are their text twins. At most `len(TAGS)` items can be
        shown; tags are unique.
        """
        layout = layout or "L" * legends + "P" * pictures + "I" * items
        check_layout(layout, layout)
        rng = np.random.default_rng([self.seed, index])
        tags = rng.permutation(len(TAGS))
        frames: list[Frame] = []
        for letter in layout:
            frames.append(draw_frame(letter, rng, tags))
            tags = tags[len(frames[-1].glyph_of) :]
        return Episode(tuple(frames), index)


def check_layout(layout: str, letters: Sequence[str]) -> None:
    """Raise ValueError for a ``layout`` whose frames, drawn as these ``letters``, are not to be had."""
    if unknown := sorted(set(letters) - set(LETTERS)):
        raise ValueError(f"layout {layout!r} has {unknown}: letters are {', '.join(LETTERS)}")
    count = sum(ITEMS_SHOWN.get(KINDS[letter.upper()], 0) for letter in letters)
    if count > len(TAGS):
        raise ValueError(f"layout {layout!r} shows {count} items, there are {len(TAGS)} tags")

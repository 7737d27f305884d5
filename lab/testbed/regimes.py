"""What a frame says when its kind is shown again: three regimes, and two letters more.

In *override* a later frame says other things than an earlier one, and wins. In *redundant*, as before a
camera, it says the same things but for a few that changed, came or went, and little has moved. In *static*
it is the earlier frame again, cell for cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kamera.testbed import GLYPHS, TAGS, Episode, Frame, World
from kamera.testbed.frames import ITEM_SIDE, Fact, draw_frame, place_facts
from kamera.testbed.world import check_layout

AGAIN, ASIDE = "J", "D"
"""Letters: items frame with the tags of the one before it; legend of glyphs that no items frame shows."""
LIKE = {AGAIN: "I", ASIDE: "L"}
"""The letter that is drawn first to make each of them."""


@dataclass(frozen=True)
class Motion:
    """Shares of what is new when a kind is shown again.

    `drift` of its facts say something else, `turnover` of them are about other subjects, `moved` of its
    cells (of its items) change places.
    """

    drift: float
    turnover: float
    moved: float


REGIMES: dict[str, Motion | None] = {
    "override": None,
    "redundant": Motion(drift=0.08, turnover=0.15, moved=0.12),
    "static": Motion(drift=0.0, turnover=0.0, moved=0.0),
}
"""By name; None draws every frame anew."""


def motion_of(regime: str) -> Motion | None:
    """The motion of a regime. Raises ValueError for an unknown one."""
    if regime not in REGIMES:
        raise ValueError(f"no regime {regime!r}: there are {', '.join(REGIMES)}")
    return REGIMES[regime]


class RepeatingWorld(World):
    """A `World` in which ``regime`` says how a frame relates to earlier ones of its kind.

    Its layouts know two letters more: J items with the tags of the items frame before it, D a legend about
    glyphs that no items frame shows. Raises ValueError for an unknown regime.
    """

    def __init__(self, seed: int = 0, regime: str = "override") -> None:
        super().__init__(seed)
        self._motion = motion_of(regime)

    def episode(
        self, index: int, legends: int = 3, items: int = 1, pictures: int = 0, layout: str = ""
    ) -> Episode:
        """As `World.episode`. Tags are unique in the regime `override` but for J."""
        layout = layout or "L" * legends + "P" * pictures + "I" * items
        check_layout(layout, [LIKE.get(letter, letter) for letter in layout])
        rng = np.random.default_rng([self.seed, index])
        tags = rng.permutation(len(TAGS))
        frames: list[Frame] = []
        for letter in layout:
            # what is aside is nobody's earlier frame
            before = [f for f, drawn in zip(frames, layout, strict=False) if drawn != ASIDE]
            if letter == AGAIN and not any(frame.shows_items for frame in before):
                raise ValueError(f"layout {layout!r} has {AGAIN} before any items frame: put I or B first")
            frames.append(draw_again(letter, before, self._motion, rng, tags))
            tags = tags[len(frames[-1].glyph_of) :]
        for at, letter in enumerate(layout):
            if letter == ASIDE:
                frames[at] = aside(frames, frames[at], rng)
        return Episode(tuple(frames), index)


def contested(episode: Episode, kind: str, target: int) -> list[int]:
    """Subjects of which frame ``target`` and another say different things: the later of them wins.

    ``kind`` is `colour` (``target`` is a legend) or `glyph` (``target`` is an items frame).
    """
    said = [frame.colour_of if kind == "colour" else frame.glyph_of for frame in episode.frames]
    others = [facts for index, facts in enumerate(said) if index != target]
    return [
        subject
        for subject, fact in said[target].items()
        if any(facts.get(subject, fact) != fact for facts in others)
    ]


def with_tags_of(last: Frame, frame: Frame, rng: np.random.Generator) -> Frame:
    """The items of `frame` under the tags of `last`, dealt out anew."""
    tags = rng.permutation([fact.tag for fact in last.facts])
    return replace(
        frame, facts=tuple(replace(f, tag=int(t)) for f, t in zip(frame.facts, tags, strict=False))
    )


def repeat_frame(last: Frame, fresh: Frame, motion: Motion, rng: np.random.Generator) -> Frame:
    """`last` with as much of `fresh` (of the same letter) as the motion lets in."""
    if last.kind == "picture":
        return fresh if motion.moved else last
    taken = {_subject(fact) for fact in last.facts}
    facts = []
    for old, new in zip(last.facts, fresh.facts, strict=True):
        dice, subject = rng.random(), _subject(new)
        if dice < motion.turnover and subject not in taken:
            taken.add(subject)
            facts.append(new)
        elif motion.turnover <= dice < motion.turnover + motion.drift:
            facts.append(_drift(last.kind, old, new))
        else:
            facts.append(old)
    return Frame(last.kind, tuple(facts), _move(last, motion.moved, rng))


def aside(frames: Sequence[Frame], fresh: Frame, rng: np.random.Generator) -> Frame:
    """The legend `fresh` with its subjects replaced by glyphs that none of the items `frames` shows."""
    shown = {glyph for frame in frames for glyph in frame.glyph_of.values()}
    free = rng.permutation([glyph for glyph in range(len(GLYPHS)) if glyph not in shown])
    facts = tuple(replace(f, glyph=int(g)) for f, g in zip(fresh.facts, free, strict=False))
    return Frame(fresh.kind, facts, place_facts(fresh.kind, len(facts), rng))


def draw_again(
    letter: str, before: Sequence[Frame], motion: Motion | None, rng: np.random.Generator, tags: np.ndarray
) -> Frame:
    """The next frame of a window: drawn anew, or what was shown, shown again."""
    fresh = draw_frame(LIKE.get(letter, letter), rng, tags)
    alike = (f for f in reversed(before) if (f.kind, f.is_text) == (fresh.kind, fresh.is_text))
    last = next(alike, None)
    if letter == AGAIN and motion is None:
        return with_tags_of(next(f for f in reversed(before) if f.shows_items), fresh, rng)
    if motion is None or last is None or letter == ASIDE:
        return fresh
    return repeat_frame(last, fresh, motion, rng)


def _subject(fact: Fact) -> int:
    return fact.tag if fact.tag >= 0 else fact.glyph


def _drift(kind: str, old: Fact, new: Fact) -> Fact:
    """The same subject, and what `new` says of its own."""
    if kind == "legend":
        return replace(old, colour=new.colour)
    if kind == "rename":
        return old if new.target == old.glyph else replace(old, target=new.target)
    return replace(old, glyph=new.glyph)


def _move(frame: Frame, share: float, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    """The frame's cells with a share of them (of its items) dealt out anew among themselves."""
    if not frame.cells:
        return ()
    side = ITEM_SIDE if frame.shows_items else 1
    slots = np.array(frame.cells)[::side, ::side]
    flat = slots.reshape(-1).copy()
    at = rng.permutation(flat.size)[: round(share * flat.size)]
    flat[at] = flat[rng.permutation(at)]
    grid = np.kron(flat.reshape(slots.shape), np.ones((side, side), dtype=int))
    return tuple(map(tuple, grid.tolist()))

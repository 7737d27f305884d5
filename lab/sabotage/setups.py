"""What is served and what is asked: windows in which position, binding or departure decides the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.ops import KV, Patch, deficit, patch_of
from kamera.patches.anchor import Anchor
from kamera.testbed import Episode, Question
from kamera.testbed.world import answer_with_frames
from lab.sabotage.arms import Material
from lab.scene import Scene
from lab.testbed.regimes import RepeatingWorld, contested

HELD_OUT = 970_000
"""Seed of the episodes asked."""
ELSEWHERE = 100_000
"""The number of the episode that the first window's other chunk is taken from."""

Choose = Callable[[Episode, "Setup"], list[tuple[str, int]]]


@dataclass(frozen=True)
class Setup:
    """Frames of an episode of `layout`: `target` is served behind `window`.

    Its patch is formed there, the stale one behind `stale`. With `before` the target is a survivor: its KV
    was computed behind those frames, and the patch takes out what has left. `choose` gives the kinds and
    subjects asked.
    """

    name: str
    asks: str
    layout: str
    window: tuple[int, ...]
    stale: tuple[int, ...]
    target: int
    choose: Choose
    before: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The window as the questions find it."""
        return (*self.window, self.target)


def _bound(episode: Episode, setup: Setup) -> list[tuple[str, int]]:
    tags = episode.frames[setup.target].glyph_of
    return [("value", t) for t in tags if episode.ask("value", t, setup.order).bound]


def _contested(*kinds: str) -> Choose:
    def choose(episode: Episode, setup: Setup) -> list[tuple[str, int]]:
        shown = Episode(tuple(episode.frames[i] for i in setup.order), episode.index)
        own = "colour" if shown.frames[-1].colour_of else "glyph"
        return [(kind, s) for s in contested(shown, own, len(shown.frames) - 1) for kind in kinds]

    return choose


def _ago(episode: Episode, setup: Setup) -> list[tuple[str, int]]:
    return Episode(tuple(episode.frames[i] for i in setup.order), episode.index).subjects(["ago"])


def _earlier(episode: Episode, setup: Setup) -> list[tuple[str, int]]:
    shown = Episode(tuple(episode.frames[i] for i in setup.order), episode.index)
    # decided by the place of the frame served: another answer if that had come first
    turned = (len(shown.frames) - 1, *range(len(shown.frames) - 1))
    asked = shown.subjects(["earlier"])
    both = [(s, answer_with_frames([shown.frames[i] for i in turned], *s)) for s in asked]
    return [s for s, found in both if found is not None and found[0] != shown.ask(*s).answer]


def _read_from(left: bool) -> Choose:
    def choose(episode: Episode, setup: Setup) -> list[tuple[str, int]]:
        gone = set(setup.before) - set(setup.window)
        was = (*setup.before, setup.target)
        asked = [("value", t) for t in episode.frames[setup.target].glyph_of]
        bound = [(s, episode.ask(*s, order=was)) for s in asked]
        return [s for s, q in bound if q.bound and bool(gone.intersection(q.frames)) is left]

    return choose


SETUPS: tuple[Setup, ...] = (
    Setup(
        "bound",
        "values of items that the legends before them bind; a legend about other things among those",
        "LLLLLLDI",
        window=(3, 6, 4, 5),
        stale=(0, 6, 1, 2),
        target=7,
        choose=_bound,
    ),
    Setup(
        "last says",
        "colours of which the legend served and another, reordered, say different things",
        "LLLLLI",
        window=(4, 2, 5),
        stale=(0, 1, 5),
        target=3,
        choose=_contested("colour"),
    ),
    Setup(
        "shown again",
        "tags of which the items frame served and the one before it say different things",
        "LLLLIJ",
        window=(2, 3, 4),
        stale=(0, 1, 4),
        target=5,
        choose=_contested("glyph", "value"),
    ),
    Setup(
        "earlier",
        "which of two glyphs was last shown earlier, one of them in the legend served",
        "LLLLLLI",
        window=(2, 3, 6),
        stale=(0, 1, 6),
        target=4,
        choose=_earlier,
    ),
    Setup(
        "ago",
        "how many frames ago a glyph was last shown",
        "LLLLLLI",
        window=(2, 3, 6),
        stale=(0, 1, 6),
        target=4,
        choose=_ago,
    ),
    Setup(
        "left",
        "values a survivor had read from the legend that has left",
        "LLLI",
        window=(1,),
        stale=(2, 1),
        target=3,
        choose=_read_from(left=True),
        before=(0, 1),
    ),
    Setup(
        "stayed",
        "values a survivor had read from the legends that stay",
        "LLLI",
        window=(1,),
        stale=(2, 1),
        target=3,
        choose=_read_from(left=False),
        before=(0, 1),
    ),
)


@dataclass(frozen=True)
class Bench:
    """What all windows of a bed share."""

    backbone: HfEngine
    anchor: Anchor
    regime: str
    seed: int
    rank: int

    def episode(self, setup: Setup, index: int) -> Episode:
        """The `index`-th episode of a setup."""
        return RepeatingWorld(HELD_OUT + self.seed, self.regime).episode(index, layout=setup.layout)


def questions(episode: Episode, setup: Setup, most: int) -> list[Question]:
    """Up to `most` questions of a setup, answered for its window."""
    subjects = setup.choose(episode, setup)
    rng = np.random.default_rng([HELD_OUT, episode.index])
    subjects = [subjects[i] for i in rng.permutation(len(subjects))]
    return [episode.ask(*subject, order=setup.order) for subject in subjects[:most]]


@dataclass(frozen=True, eq=False)
class Situation:
    """One window: its scene, and the canonical, patches and offset its target is served from."""

    scene: Scene
    canonical: KV
    offset: tuple[int, ...]
    patch: Patch
    stale: Patch

    def material(self, another: Patch, seed: int) -> Material:
        """What the arms get, with the patch of another chunk."""
        return Material(self.canonical, self.patch, self.scene.layout, self.offset, another, self.stale, seed)


def situation(bench: Bench, setup: Setup, index: int) -> Situation:
    """The `index`-th window of a setup."""
    frames = bench.episode(setup, index).frames

    def chunks(order: Sequence[int]) -> list[Chunk]:
        return [bench.backbone.chunk(frames[i].content) for i in order]

    (target,) = chunks([setup.target])
    scene = Scene(bench.backbone, bench.anchor, chunks(setup.window), target)
    stale = scene.behind(chunks(setup.stale))
    if not setup.before:
        patches = (one.patch.truncate(bench.rank) for one in (scene, stale))
        return Situation(scene, scene.canonical, scene.offset, *patches)
    was = scene.behind(chunks(setup.before))
    patches = (_removal(scene, one, bench.rank) for one in (was, stale))
    return Situation(scene, was.conditioned, scene.offset_from(was.positions), *patches)


def _removal(now: Scene, was: Scene, rank: int) -> Patch:
    """What takes the target's KV of `was` to that of `now`, in the frame of `was`."""
    change = deficit(now.conditioned, was.conditioned, now.layout, now.offset_from(was.positions))
    return patch_of(change, rank, now.dtype).patch

"""The windows of the tables: one pool of frames an episode, and every window a choice from it.

A pool holds six antecedents (legends and renames), three frames that stand in for others, three
distractor pictures, the items frame that is served and a second one. Windows of one episode share its
chunks, the vision encodes, the canonical and every KV already computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kamera import testbed
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import Anchor, prefill_anchor
from lab.basis import Basis
from lab.paper.trial import Asked, Trial
from lab.scene import Operator, Scene
from lab.testbed.regimes import RepeatingWorld

HELD_OUT = 950_000
"""Seed of the episodes asked; the basis is fitted on `FITTED`, and backbones were trained from 1 000 000."""

FITTED = 960_000
ANTECEDENTS = ("LLRLRL", "LRLLLR")
"""Taken in turn: the first three, four or six stand before the items frame."""
AGREEING = "LLLLLL"
"""The same in worlds whose frames agree: a rename says otherwise than the legends before it."""

MAIN = (0, 1, 2)
"""The window most tables are about."""

NEW = (6, 7, 8)
"""Frames that stand in for antecedents."""

PICTURES = (9, 10, 11)
TARGET, COMPANION = 12, 13
"""The items frame that is served, and one that shares its clip where it is served in one."""

POOL = 14
"""Frames of a pool."""

PER_WINDOW = 12
"""Multi-hop questions asked in a window at most."""

MANY = 24
"""The same where a window costs more than its questions do: fewer windows are needed."""

ONE_HOP = 4
"""One-hop questions asked beside them, as a control."""

RANK = 16
"""Of patches where a table is not about ranks."""


@dataclass(frozen=True, eq=False)
class Bench:
    """What all windows of one family share."""

    backbone: HfEngine
    anchor: Anchor
    basis: Basis
    seed: int
    make: Make

    @classmethod
    def prepare(
        cls, backbone: HfEngine, seed: int, fitted: int, make: Make | None = None, system: str | None = None
    ) -> Bench:
        """Prefill the anchor and fit the shared basis on ``fitted`` episodes that are never asked.

        ``make`` gives the stages (default: the testbed's, under its system prompt).
        """
        anchor = prefill_anchor(backbone, testbed.SYSTEM if make is None else system)
        make = make or Stage
        windows = (make(backbone, anchor, FITTED + seed, index, None) for index in range(fitted))
        return cls(backbone, anchor, Basis.fit(stage.scene(MAIN) for stage in windows), seed, make)

    def stage(self, index: int) -> Stage:
        """The ``index``-th episode."""
        return self.make(self.backbone, self.anchor, HELD_OUT + self.seed, index, self.basis)


@dataclass(eq=False)
class Stage:
    """One episode of a regime. Orders are indices into its frames; the items frame stands behind them."""

    backbone: HfEngine
    anchor: Anchor
    seed: int
    index: int
    basis: Basis | None = None
    regime: str = "override"
    _chunks: dict[int, Chunk] = field(default_factory=dict)
    _trials: dict[tuple[int, ...], Trial] = field(default_factory=dict)

    def content(self, frame: int) -> list[dict[str, Any]]:
        """The chat content of a frame."""
        return self.episode.frames[frame].content

    def twin(self, frame: int) -> list[dict[str, Any]] | None:
        """The same facts as words; None if nobody wrote them down."""
        shown = self.episode.frames[frame]
        return testbed.Frame(shown.kind, shown.facts).content

    @cached_property
    def episode(self) -> testbed.Episode:
        """The frames: antecedents, stand-ins, pictures, items, more items."""
        world = RepeatingWorld(self.seed, self.regime)
        if self.regime != "override":
            return world.episode(self.index, layout=f"{AGREEING}LLLPPPII")
        antecedents = ANTECEDENTS[self.index % len(ANTECEDENTS)]
        return world.episode(self.index, layout=f"{antecedents}LRLPPPII")

    def under(self, operator: Operator) -> Stage:
        """This episode with every target served by another operator; it shares all that is true."""
        other = copy.copy(self)
        other._trials = {key: trial.under(operator) for key, trial in self._trials.items()}
        other._root = self._root.under(operator)
        return other

    def rng(self, *what: int) -> np.random.Generator:
        """A generator of this episode's own for one purpose, whichever tables run."""
        return np.random.default_rng([self.seed, self.index, *what])

    def chunk(self, frame: int) -> Chunk:
        """The chunk of one frame."""
        if frame not in self._chunks:
            self._chunks[frame] = self.backbone.chunk(self.content(frame))
        return self._chunks[frame]

    def chunks(self, order: Sequence[int]) -> list[Chunk]:
        """The chunks of these frames."""
        return [self.chunk(frame) for frame in order]

    @cached_property
    def _root(self) -> Scene:
        return Scene(self.backbone, self.anchor, self.chunks(MAIN), self.chunk(TARGET))

    def scene(self, order: Sequence[int]) -> Scene:
        """The items frame behind these frames."""
        return self._root.behind(self.chunks(order))

    def trial(self, order: Sequence[int], most: int = PER_WINDOW) -> Trial:
        """`scene` with questions whose answers these frames bind, and the one-hop control."""
        key = (most, *order)
        if key not in self._trials:
            self._trials[key] = Trial(self.scene(order), self.questions(order, most))
        return self._trials[key]

    def questions(self, order: Sequence[int], most: int = PER_WINDOW) -> Sequence[testbed.Question | Asked]:
        """Up to ``most`` questions on items these frames bind, then up to `ONE_HOP` on the same items."""
        window = (*order, TARGET)
        subjects = [("value", tag) for tag in self.episode.frames[TARGET].glyph_of]
        asked = [self.episode.ask(*subject, order=window) for subject in subjects]
        bound = [q for q in asked if q.bound]
        chosen = [bound[i] for i in self.rng(*window).permutation(len(bound))[:most]]
        control = [self.episode.ask("glyph", q.subject, order=window) for q in chosen[:ONE_HOP]]
        return [*chosen, *control]


Make = Callable[[HfEngine, Anchor, int, int, Basis | None], Stage]
"""A stage of a backbone and an anchor, by seed and index, with the shared basis."""

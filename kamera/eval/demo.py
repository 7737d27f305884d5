"""The demo: clips under a small window, edited as by an agent, beside a prefix cache and blind reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kamera import testbed
from kamera.certify import kl
from kamera.content import Chunk
from kamera.engines.hf import Backbone, HfEngine
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import Event, KameraWindow, Report

Item = TypeVar("Item")

SEED = 700_000
LAYOUT = "LLILIL"
"""Legends and items frames of a clip: an items frame shows shapes, a legend says what they stand for."""

IN_VIEW = 3
"""Frames that the window holds."""

CACHE, KAMERA, BLIND, EXACT = "prefix cache", "kamera", "blind reuse", 'kamera, on_leave="exact"'
WORST = "worst case: what left decides"


@dataclass(frozen=True)
class DemoRow:
    """One arm after one operation, over all clips: tokens, answers that are right, KL to the re-prefill.

    ``tokens`` ran before the answer, ``background`` after it. ``right`` of ``n`` answers are those of the
    clip's truth. ``kl`` is the mean divergence of the answers' first token from the re-prefill's, in nats.
    ``seconds`` passed before an answer could begin, where they were measured.
    """

    operation: str
    arm: str
    tokens: int
    background: int
    right: int
    n: int
    kl: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Demo:
    """The table, and of the first clip what the slots were worth and the window's events.

    ``answers`` of a walk over own pictures: after which operation, the question, the re-prefill's answer and
    the window's.
    """

    rows: tuple[DemoRow, ...]
    clips: int
    guarantees: tuple[tuple[str, str], ...]
    events: tuple[Event, ...] = ()
    answers: tuple[tuple[str, ...], ...] = ()


def run_demo(
    directory: Path, *, clips: int = 3, per_kind: int = 8, backbone: Backbone | HfEngine | None = None
) -> Iterator[str | Demo]:
    """Render and decode clips and run the operations on each; yields progress, then the table.

    Clips are written to ``directory`` as mp4 and decoded with PyAV; the chunks are the decoded frames.
    """
    engine = HfEngine(*testbed.load()) if backbone is None else backbone.engine
    rows: dict[tuple[str, str], list[DemoRow]] = {}
    shown: list[tuple[str, str]] = []
    events: list[Event] = []
    for clip in range(clips):
        episode = testbed.World(SEED).episode(clip, layout=LAYOUT)
        path = directory / f"clip{clip}.mp4"
        testbed.render_video(episode.frames, path)
        walk = _ClipWalk(engine, episode, testbed.read_frames(path), [SEED, clip], per_kind)
        if clip == 0:
            walk.window.on_event(partial(hear, events))
        for operation in walk.operations():
            yield f"clip {clip + 1} of {clips}: {operation}"
            for row in walk.rows(operation):
                rows.setdefault((operation, row.arm), []).append(row)
            if clip == 0:
                shown.append((operation, " ".join(slot.guarantee for slot in walk.shown)))
    yield Demo(tuple(map(over_all, rows.values())), clips, tuple(shown), tuple(events))


def over_all(rows: Sequence[DemoRow]) -> DemoRow:
    """The rows of one arm after one kind of operation as one."""
    sums: dict[str, Any] = {
        n: sum(getattr(r, n) for r in rows) for n in ("tokens", "background", "right", "n", "seconds")
    }
    return replace(rows[0], **sums, kl=float(np.mean([row.kl for row in rows])))


def blind_of(window: KameraWindow) -> KameraWindow:
    """A fork of a window in which every slot shows its canonical."""
    blind = window.fork()
    for slot in blind.slots:
        blind.condition(slot, False)
    return blind


def behind_change(before: Sequence[Item], after: Sequence[Item]) -> Sequence[Item]:
    """What a prefix cache that has ``before`` runs of ``after``: all from the first change on."""
    same = [*takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))]
    return after[len(same) :]


def hear(events: list[Event], event: Event) -> None:
    """Note an event of the window; those of its forks are another's."""
    if not events or event.window == events[0].window:
        events.append(replace(event, session=KAMERA))


class _ClipWalk:
    """The operations on one clip, in a window under the default policy; the last one in a new window."""

    def __init__(
        self, backbone: HfEngine, episode: Any, pictures: Sequence[Any], seed: Sequence[int], per_kind: int
    ) -> None:
        self.backbone, self.episode, self.per_kind = backbone, episode, per_kind
        self.rng = np.random.default_rng(seed)
        self.chunks: list[Chunk] = [
            backbone.chunk([{"type": "image", "image": picture}, {"type": "text", "text": frame.caption}])
            for frame, picture in zip(episode.frames, pictures, strict=True)
        ]
        self.store = ChunkStore.open("memory://")
        self.window = self.shown = KameraWindow(backbone, self.store, testbed.SYSTEM)
        self.before: list[int] = []  # the frames in view before the operation
        self.tokens = self.background = 0

    def operations(self) -> Iterator[str]:
        """Run them one by one; the window, and what each ran, are its outcome while it is yielded."""
        window = self.window
        for chunk in self.chunks[:IN_VIEW]:
            window.append(chunk)
        window.flush()
        for name in ("new frame, first", "new frame"):
            yield self._done(name, lambda: (window.slide(), window.append(self.chunks[self._next()])))
        gone = self.chunks[1].id
        for name in ("look back, first", "look back"):
            yield self._done(name, lambda: (window.recall(gone),))
            self._unseen(lambda: window.evict(len(window) - 1))
        self._unseen(lambda: window.recall(gone))
        yield self._done("the second leaves", lambda: (window.evict(1),))
        yield self._done("prepare orders", lambda: (window.prepare_orders(),))
        yield self._done("another order", lambda: (window.reorder([2, 0, 1]),))
        window = self.window = self._window(ReusePolicy(), range(IN_VIEW))
        window.flush()
        yield self._done(WORST, lambda: (window.evict(1),))

    def rows(self, operation: str) -> Iterator[DemoRow]:
        """Every arm after an operation."""
        order = self._frames(self.shown)
        fresh = self._window(ReusePolicy.exact(), order)
        blind, rest = blind_of(self.shown), behind_change(self.before, order)
        cached = 0 if operation == "prepare orders" else sum(self.chunks[i].num_tokens for i in rest)
        arms = {CACHE: (fresh, cached, 0), KAMERA: (self.shown, self.tokens, self.background)}
        if operation == WORST:
            strict = self._window(ReusePolicy(on_leave="exact"), self.before)
            report = strict.evict(1)
            arms[EXACT] = (strict, report.tokens_recomputed, 0)
        arms[BLIND] = (blind, 0, 0)
        questions = self._questions("value" if operation == WORST else "glyph", order)
        truths = [int(self.backbone.builder.tokenize(question.answer)[0]) for question in questions]
        ideal = _logits(fresh, questions)
        for arm, (window, tokens, background) in arms.items():
            logits = _logits(window, questions)
            right = sum(int(one.argmax()) == truth for one, truth in zip(logits, truths, strict=True))
            divergence = float(kl(torch.stack(logits), torch.stack(ideal)).mean())
            yield DemoRow(operation, arm, tokens, background, right, len(questions), divergence)

    def _done(self, name: str, run: Any) -> str:
        """Run an operation and what it leaves to the background, and note both."""
        self.before, old = self._frames(self.window), self.window.usage().background.tokens
        reports: tuple[Report, ...] = run()
        self.tokens, self.shown = sum(report.tokens_recomputed for report in reports), self.window.fork()
        self.window.flush()
        self.background = self.window.usage().background.tokens - old
        return name

    def _unseen(self, run: Any) -> None:
        """An operation between two that are shown."""
        run()
        self.window.flush()

    def _next(self) -> int:
        """The first frame that was never in view."""
        return max(self._frames(self.window)) + 1

    def _window(self, policy: ReusePolicy, order: Sequence[int]) -> KameraWindow:
        window = KameraWindow(self.backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=policy)
        for i in order:
            window.append(self.chunks[i])
        return window

    def _questions(self, kind: str, order: Sequence[int]) -> list[testbed.Question]:
        """About shapes in view ("glyph"), or about what they stand for in this order ("value")."""
        tags = [tag for i in order for tag in self.episode.frames[i].glyph_of]
        chosen = [tags[i] for i in self.rng.permutation(len(tags))[: self.per_kind]]
        return [self.episode.ask(kind, tag, order) for tag in chosen]

    def _frames(self, window: KameraWindow) -> list[int]:
        """The frames that a window shows."""
        ids = [chunk.id for chunk in self.chunks]
        return [ids.index(slot.chunk_id) for slot in window.slots]


def _logits(window: KameraWindow, questions: Sequence[testbed.Question]) -> list[torch.Tensor]:
    return [window.next_token_logits(question.text) for question in questions]

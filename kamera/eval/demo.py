"""The demo: a rendered clip in a small window, with three ways to keep its KV compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kamera import testbed
from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.eval.items import Item, Score, Scorer, answer_logits
from kamera.store import ChunkStore
from kamera.window import KameraWindow, Report, ReusePolicy

SEED = 700_000
LAYOUT = "LLILIL"
"""Legends and items frames of a clip; the last legend slides the first one out of the window."""

ARMS = ("re-prefill", "blind reuse", "kamera")
RANK = 16
POLICY = ReusePolicy(rank=RANK, certified=False)
"""Uncertified: the demo itself shows the fidelity next to the re-prefill."""


@dataclass(frozen=True)
class Cost:
    """Cost of one arm for one operation."""

    forwards: int
    tokens: int
    vision_encodes: int
    milliseconds: float


@dataclass(frozen=True)
class Row:
    """One arm after one operation, over all clips: accuracy, KL to the re-prefill, mean cost."""

    operation: str
    arm: str
    one_hop: float
    two_hop: float
    kl: float
    n: int
    forwards: float
    vision_encodes: float
    milliseconds: float


@dataclass(frozen=True)
class Demo:
    """The table, and the guarantees of the first clip's slots."""

    rows: tuple[Row, ...]
    clips: int
    guarantees: tuple[tuple[str, str], ...]


def run_demo(
    directory: Path, *, clips: int = 3, per_kind: int = 8, backbone: Backbone | None = None
) -> Iterator[str | Demo]:
    """Render and decode clips and run the operations on each; yields progress, then the table.

    Clips are written to ``directory`` as mp4 and decoded with PyAV; the chunks are the decoded frames.
    """
    if backbone is None:
        backbone = Backbone(*testbed.load())
    scorer = Scorer(backbone.tokenize)
    costs: dict[tuple[str, str], list[Cost]] = {}
    shown: list[tuple[str, str]] = []
    for clip in range(clips):
        episode = testbed.World(SEED).episode(clip, layout=LAYOUT)
        path = directory / f"clip{clip}.mp4"
        testbed.render_video(episode.frames, path)
        frames = testbed.read_frames(path)
        walk = _Walk(backbone, episode, frames, np.random.default_rng([SEED, clip]), per_kind)
        for operation, report in walk.operations():
            yield f"clip {clip + 1} of {clips}: {operation}"
            arms, cost = walk.arms(report)
            items = walk.items()
            scorer.add(operation, items, {n: answer_logits(w, items) for n, w in arms.items()})
            for arm, spent in cost.items():
                costs.setdefault((operation, arm), []).append(spent)
            if clip == 0:
                shown.append((operation, " ".join(s.guarantee for s in walk.window.slots)))
    rows = _rows(scorer.scores(), costs)
    yield Demo(tuple(rows), clips, tuple(shown))


class _Walk:
    """The operations on one clip."""

    def __init__(
        self,
        backbone: Backbone,
        episode: Any,
        pictures: Sequence[Any],
        rng: np.random.Generator,
        per_kind: int,
    ) -> None:
        self.backbone, self.episode, self.rng, self.per_kind = backbone, episode, rng, per_kind
        self.chunks: list[Chunk] = [
            backbone.chunk([{"type": "image", "image": picture}, {"type": "text", "text": frame.caption}])
            for frame, picture in zip(episode.frames, pictures, strict=True)
        ]
        self.store = ChunkStore.open("memory://")
        self.window = KameraWindow(backbone, self.store, testbed.SYSTEM, policy=POLICY)
        anchor = self.window.num_tokens
        # the limit holds all but the first frame, so the last append slides by itself
        most = anchor + sum(c.num_tokens for c in self.chunks[1:])
        self.window = KameraWindow(
            backbone,
            self.store,
            testbed.SYSTEM,
            policy=POLICY,
            max_tokens=most,
        )

    def operations(self) -> Iterator[tuple[str, Report]]:
        """Run the operations one by one; each is yielded while the window is in its resulting state."""
        window = self.window
        for chunk in self.chunks[:-1]:
            window.append(chunk)
        yield "append (slides by itself)", window.append(self.chunks[-1])
        yield "slide", window.slide()
        items = self._slot_of(4)
        window.evict(items)
        yield "recall, first time", window.recall(self.chunks[4].id)
        window.evict(self._slot_of(4))
        yield "recall", window.recall(self.chunks[4].id)
        yield "reorder, first time", window.reorder([2, 1, 0, 3])
        window.reorder([2, 1, 0, 3])
        yield "reorder", window.reorder([2, 1, 0, 3])

    def arms(self, report: Report) -> tuple[dict[str, KameraWindow], dict[str, Cost]]:
        """The window after an operation, blind, and re-prefilled; and the cost of each."""
        blind = self.window.fork()
        reports = [blind.condition(slot, False) for slot in blind.slots[1:]]
        started = time.perf_counter()
        fresh = KameraWindow(
            self.backbone,
            ChunkStore.open("memory://"),
            testbed.SYSTEM,
            policy=ReusePolicy(minimum="exact"),
        )
        prefills = [fresh.append(self._chunk(s.chunk_id), archive="later") for s in self.window.slots]
        elapsed = time.perf_counter() - started
        windows = dict(zip(ARMS, (fresh, blind, self.window), strict=True))
        spent = {
            "re-prefill": _sum(prefills, elapsed),
            "blind reuse": _sum(reports, sum(r.seconds for r in reports)),
            "kamera": _sum([report], report.seconds),
        }
        return windows, spent

    def items(self) -> list[Item]:
        """Questions that frames in the window answer: two hops, and one hop in a frame."""
        order = [self._frame(s.chunk_id) for s in self.window.slots]
        values = [self.episode.ask(*s, order=order) for s in self._subjects("value", order)]
        bound = [q for q in values if q.bound and self._seen(q, order)]
        chosen = [bound[i] for i in self.rng.permutation(len(bound))[: self.per_kind]]
        glyphs = [self.episode.ask("glyph", q.subject, order=order) for q in chosen]
        return [Item(q.text, q.answer, q.kind) for q in (*chosen, *glyphs)]

    def _subjects(self, kind: str, order: Sequence[int]) -> list[tuple[str, int]]:
        tags = [tag for i in order for tag in self.episode.frames[i].glyph_of]
        return [(kind, tag) for tag in tags]

    def _seen(self, question: Any, order: Sequence[int]) -> bool:
        """True if the window shows the frames of the answer; excludes survivors whose legend has left."""
        items = question.frames[-1]
        return order.index(items) > 0

    def _slot_of(self, frame: int) -> Any:
        return next(s for s in self.window.slots if s.chunk_id == self.chunks[frame].id)

    def _frame(self, chunk_id: str) -> int:
        return next(i for i, c in enumerate(self.chunks) if c.id == chunk_id)

    def _chunk(self, chunk_id: str) -> Chunk:
        return self.chunks[self._frame(chunk_id)]


def _sum(reports: Sequence[Report], seconds: float) -> Cost:
    return Cost(
        sum(r.forwards for r in reports),
        sum(r.tokens_recomputed for r in reports),
        sum(r.vision_encodes for r in reports),
        1e3 * seconds,
    )


def _rows(scores: Sequence[Score], costs: dict[tuple[str, str], list[Cost]]) -> Iterator[Row]:
    by = {(s.operation, s.kind, s.arm): s for s in scores}
    for (operation, arm), spent in costs.items():
        two, one = by[(operation, "value", arm)], by[(operation, "glyph", arm)]
        yield Row(
            operation,
            arm,
            one.accuracy.mean,
            two.accuracy.mean,
            two.kl,
            two.n,
            float(np.mean([c.forwards for c in spent])),
            float(np.mean([c.vision_encodes for c in spent])),
            float(np.median([c.milliseconds for c in spent])),
        )

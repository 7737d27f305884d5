"""The demo: a rendered clip under a small window, four ways of keeping its KV, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kamera import testbed
from kamera.content import Chunk
from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.items import OneTokenQuestion, Score, Scorer, answer_logits
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import Append, Event, Evict, KameraWindow, Recall, Reorder, Report, Slide

SEED = 700_000
LAYOUT = "LLILIL"
"""Legends and items frames of a clip; the last legend slides the first one out of the window."""

RANK = 16
POLICIES = {
    "survivor": replace(ReusePolicy.streaming(), forms="always", rank=RANK),
    "repair": replace(ReusePolicy.streaming(), forms="always", rank=RANK, withheld=frozenset({"survivor"})),
}
"""What becomes of the chunks that stay when others leave: kept, or brought as if the others had never been.

Uncertified: what a certificate would vouch for is what is shown here, next to the re-prefill.
"""


@dataclass(frozen=True)
class DemoCost:
    """Cost of one arm for one operation."""

    forwards: int
    tokens: int
    vision_encodes: int
    milliseconds: float


@dataclass(frozen=True)
class DemoRow:
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
    """The table, what the slots of the first clip were worth (after which operation, in which arm), and the
    events of its windows, whose sessions are the arms."""

    rows: tuple[DemoRow, ...]
    clips: int
    guarantees: tuple[tuple[str, str, str], ...]
    events: tuple[Event, ...] = ()


def run_demo(
    directory: Path, *, clips: int = 3, per_kind: int = 8, backbone: Backbone | HfEngine | None = None
) -> Iterator[str | Demo]:
    """Render and decode clips and run the operations on each; yields progress, then the table.

    Clips are written to ``directory`` as mp4 and decoded with PyAV; the chunks are the decoded frames.
    """
    engine = HfEngine(*testbed.load()) if backbone is None else backbone.engine
    scorer = Scorer(engine)
    costs: dict[tuple[str, str], list[DemoCost]] = {}
    shown: list[tuple[str, str, str]] = []
    events: list[Event] = []
    for clip in range(clips):
        episode = testbed.World(SEED).episode(clip, layout=LAYOUT)
        path = directory / f"clip{clip}.mp4"
        testbed.render_video(episode.frames, path)
        frames = testbed.read_frames(path)
        walk = _ClipWalk(engine, episode, frames, np.random.default_rng([SEED, clip]), per_kind)
        if clip == 0:
            for arm, window in walk.windows.items():
                window.on_event(partial(_hear, events, arm))
        for operation, reports in walk.operations():
            yield f"clip {clip + 1} of {clips}: {operation}"
            arms, cost = walk.arms(reports)
            items = walk.items()
            scorer.add(operation, items, {n: answer_logits(w, items) for n, w in arms.items()})
            for arm, spent in cost.items():
                costs.setdefault((operation, arm), []).append(spent)
            if clip == 0:
                for arm, window in walk.windows.items():
                    shown.append((operation, arm, " ".join(s.guarantee for s in window.slots)))
    rows = _rows(scorer.scores(), costs)
    yield Demo(tuple(rows), clips, tuple(shown), tuple(events))


def _hear(events: list[Event], arm: str, event: Event) -> None:
    """Note an event of an arm's own window; those of its forks are another arm's."""
    own = next((each.window for each in events if each.session == arm), event.window)
    if event.window == own:
        events.append(replace(event, session=arm))


class _ClipWalk:
    """The operations on one clip."""

    def __init__(
        self,
        backbone: HfEngine,
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
        self.windows = {arm: self._opened(policy) for arm, policy in POLICIES.items()}

    def operations(self) -> Iterator[tuple[str, dict[str, Report]]]:
        """Run them one by one in every window; they are each one's outcome while it is yielded."""
        for chunk in self.chunks[:-1]:
            for window in self.windows.values():
                window.append(chunk)
        yield "append (slides by itself)", self._all(Append(self.chunks[-1]))
        yield "slide", self._all(Slide())
        for name in ("recall, first time", "recall"):
            self._all(Evict(self._place_of(4)))
            yield name, self._all(Recall(self.chunks[4].id))
        turned = Reorder([2, 1, 0, 3])
        yield "reorder, first time", self._all(turned)
        self._all(turned)
        yield "reorder", self._all(turned)

    def arms(self, reports: dict[str, Report]) -> tuple[dict[str, KameraWindow], dict[str, DemoCost]]:
        """The windows after an operation, one of them blind, and one prefilled afresh; and what each took."""
        blind = self.windows["survivor"].fork()
        switched = [blind.condition(slot, False) for slot in blind.slots]
        started = time.perf_counter()
        fresh = KameraWindow(
            self.backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=ReusePolicy.exact()
        )
        prefills = [fresh.append(self._chunk(s.chunk_id), archive="later") for s in blind.slots]
        elapsed = time.perf_counter() - started
        windows = {"re-prefill": fresh, "blind reuse": blind, **self.windows}
        spent = {
            "re-prefill": _sum(prefills, elapsed),
            "blind reuse": _sum(switched, sum(r.seconds for r in switched)),
            **{arm: _sum([report], report.seconds) for arm, report in reports.items()},
        }
        return windows, spent

    def items(self) -> list[OneTokenQuestion]:
        """Questions about all there is in the window: values, whatever left with other frames, and glyphs."""
        order = [self._frame(s.chunk_id) for s in self.windows["survivor"].slots]
        values = [self.episode.ask(*s, order=order) for s in self._subjects("value", order)]
        chosen = [values[i] for i in self.rng.permutation(len(values))[: self.per_kind]]
        glyphs = [self.episode.ask("glyph", q.subject, order=order) for q in chosen]
        return [OneTokenQuestion(q.text, q.answer, q.kind) for q in (*chosen, *glyphs)]

    def _subjects(self, kind: str, order: Sequence[int]) -> list[tuple[str, int]]:
        tags = [tag for i in order for tag in self.episode.frames[i].glyph_of]
        return [(kind, tag) for tag in tags]

    def _opened(self, policy: ReusePolicy) -> KameraWindow:
        """A window with room for all but the first frame: the last append slides by itself."""
        store = ChunkStore.open("memory://")
        anchor = KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy).num_tokens
        room = anchor + sum(c.num_tokens for c in self.chunks[1:])
        return KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy, max_tokens=room)

    def _all(self, request: Append | Slide | Evict | Recall | Reorder) -> dict[str, Report]:
        return {arm: window.run(window.plan(request)) for arm, window in self.windows.items()}

    def _place_of(self, frame: int) -> int:
        """Of a chunk, in every window."""
        return [s.chunk_id for s in self.windows["survivor"].slots].index(self.chunks[frame].id)

    def _frame(self, chunk_id: str) -> int:
        return next(i for i, c in enumerate(self.chunks) if c.id == chunk_id)

    def _chunk(self, chunk_id: str) -> Chunk:
        return self.chunks[self._frame(chunk_id)]


def _sum(reports: Sequence[Report], seconds: float) -> DemoCost:
    return DemoCost(
        sum(r.forwards for r in reports),
        sum(r.tokens_recomputed for r in reports),
        sum(r.vision_encodes for r in reports),
        1e3 * seconds,
    )


def _rows(scores: Iterable[Score], costs: dict[tuple[str, str], list[DemoCost]]) -> Iterator[DemoRow]:
    by = {(s.operation, s.kind, s.arm): s for s in scores}
    for (operation, arm), spent in costs.items():
        two, one = by[(operation, "value", arm)], by[(operation, "glyph", arm)]
        yield DemoRow(
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

"""The demo: a rendered clip under a small window, four ways of keeping its KV, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import testbed
from kamera.certify import kl
from kamera.content import Chunk
from kamera.engines.hf import Backbone, HfEngine
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window import Append, Event, Evict, KameraWindow, Recall, Reorder, Report, Slide, former_of

SEED = 700_000
LAYOUT = "LLILIL"
"""Legends and items frames of a clip; the last legend slides the first one out of the window."""

RANK = 16
POLICIES = {
    "survivor": ReusePolicy(forms="always", rank=RANK),
    "repair": ReusePolicy(forms="always", rank=RANK, on_leave="repair"),
}
"""What becomes of the chunks that stay when others leave: kept, or brought as if the others had never been.

Uncertified: what a certificate would vouch for is what is shown here, next to the re-prefill.
"""


@dataclass(frozen=True)
class DemoRow:
    """One arm after one operation: accuracy, KL to the re-prefill, cost; means (of the time the median)."""

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
    rows: dict[tuple[str, str], list[DemoRow]] = {}
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
            for row in walk.rows(operation, reports):
                rows.setdefault((operation, row.arm), []).append(row)
            if clip == 0:
                for arm, window in walk.windows.items():
                    shown.append((operation, arm, " ".join(s.guarantee for s in window.slots)))
    yield Demo(tuple(map(_over_clips, rows.values())), clips, tuple(shown), tuple(events))


def _over_clips(rows: Sequence[DemoRow]) -> DemoRow:
    """The rows of one arm after one operation as one; each clip has as many questions."""
    names = ("one_hop", "two_hop", "kl", "forwards", "vision_encodes")
    means: dict[str, Any] = {name: float(np.mean([getattr(row, name) for row in rows])) for name in names}
    time = float(np.median([row.milliseconds for row in rows]))
    return replace(rows[0], **means, n=sum(row.n for row in rows), milliseconds=time)


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
        self.windows = {arm: self._open(policy) for arm, policy in POLICIES.items()}

    def operations(self) -> Iterator[tuple[str, dict[str, Report]]]:
        """Run them one by one in every window; they are each one's outcome while it is yielded."""
        for chunk in self.chunks[:-1]:
            for window in self.windows.values():
                window.append(chunk)
        yield "append", self._all(Append(self.chunks[-1]))
        yield "slide", self._all(Slide())
        for name in ("recall, first", "recall"):
            self._all(Evict(self._frames(self.windows["survivor"]).index(4)))
            yield name, self._all(Recall(self.chunks[4].id))
        turned = Reorder([2, 1, 0, 3])
        yield "reorder, first", self._all(turned)
        self._all(turned)
        yield "reorder", self._all(turned)

    def rows(self, operation: str, reports: dict[str, Report]) -> Iterator[DemoRow]:
        """Every arm after an operation: the windows, one of them blind, and one prefilled afresh."""
        blind = self.windows["survivor"].fork()
        switched = [blind.condition(slot, False) for slot in blind.slots]
        started = time.perf_counter()
        fresh = KameraWindow(
            self.backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=ReusePolicy.exact()
        )
        prefills = [fresh.append(self.chunks[i], archive="later") for i in self._frames(blind)]
        elapsed = time.perf_counter() - started
        windows = {"re-prefill": fresh, "blind reuse": blind, **self.windows}
        work: dict[str, Sequence[Report]] = {"re-prefill": prefills, "blind reuse": switched}
        work |= {arm: [report] for arm, report in reports.items()}
        two_hop, one_hop = self._questions()
        ideal = _logits(fresh, two_hop)
        for arm, window in windows.items():
            logits = _logits(window, two_hop)
            seconds = elapsed if window is fresh else sum(r.seconds for r in work[arm])
            yield DemoRow(
                operation,
                arm,
                self._accuracy(one_hop, _logits(window, one_hop)),
                self._accuracy(two_hop, logits),
                float(kl(torch.stack(logits), torch.stack(ideal)).mean()),
                len(two_hop),
                sum(r.forwards for r in work[arm]),
                sum(r.vision_encodes for r in work[arm]),
                1e3 * seconds,
            )

    def _questions(self) -> tuple[list[testbed.Question], list[testbed.Question]]:
        """About values in the window, whatever left with other frames, and about their glyphs."""
        order = self._frames(self.windows["survivor"])
        tags = [tag for i in order for tag in self.episode.frames[i].glyph_of]
        chosen = [tags[i] for i in self.rng.permutation(len(tags))[: self.per_kind]]
        values = [self.episode.ask("value", tag, order) for tag in chosen]
        return values, [self.episode.ask("glyph", tag, order) for tag in chosen]

    def _accuracy(self, questions: Sequence[testbed.Question], logits: Sequence[torch.Tensor]) -> float:
        truths = [int(self.backbone.builder.tokenize(question.answer)[0]) for question in questions]
        return float(np.mean([int(one.argmax()) == truth for one, truth in zip(logits, truths, strict=True)]))

    def _open(self, policy: ReusePolicy) -> KameraWindow:
        """A window with room for all but the first frame: the last append slides by itself."""
        store = ChunkStore.open("memory://")
        anchor = former_of(KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy)).anchor
        room = anchor.length + sum(c.num_tokens for c in self.chunks[1:])
        return KameraWindow(self.backbone, store, testbed.SYSTEM, policy=policy, max_tokens=room)

    def _all(self, request: Append | Slide | Evict | Recall | Reorder) -> dict[str, Report]:
        return {arm: window.run(window.plan(request)) for arm, window in self.windows.items()}

    def _frames(self, window: KameraWindow) -> list[int]:
        """The frames that a window shows."""
        ids = [chunk.id for chunk in self.chunks]
        return [ids.index(slot.chunk_id) for slot in window.slots]


def _logits(window: KameraWindow, questions: Sequence[testbed.Question]) -> list[torch.Tensor]:
    return [window.next_token_logits(question.text) for question in questions]

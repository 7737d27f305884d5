"""Turns of a conversation: what `ChatSession.send` calls, plans, writes and runs, turn by turn."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.edits import EditPolicy, policies
from kamera.engines.hf import HfEngine
from kamera.store.disk import syncing
from lab.price.counting import watching
from lab.replay.scripts import picture_of
from lab.walks.counter import profiled, tapped

SIDE = 64
"""Pixels of a picture's side: 64 tokens on the thin backbone."""
CONVERSATIONS: dict[str, tuple[EditPolicy | None, int, bool]] = {
    "appended": (None, 2, True),
    "texts, appended": (None, 2, False),
    "last 3 pictures": (policies.keep_last_images(3), 4, True),
}
"""Each with its edit policy, the first turn that is like those after it, and whether turns have pictures."""


class Sides(NamedTuple):
    """A count until the answer's first token, and from there to the end of later work."""

    before: int
    after: int


@dataclass(frozen=True)
class Turn:
    """What one turn took: an answer of one token, then all later work.

    ``calls`` are frames of `kamera` in the calling thread, and ``plans`` those that plan. ``puts`` are calls
    of `ChunkStore.put_many`, ``syncs`` of ``os.fsync`` and ``syncfs``, ``forwards`` and ``tokens`` what the
    decoder ran, in any thread.
    """

    calls: int
    plans: int
    puts: Sides
    syncs: Sides
    forwards: Sides
    tokens: Sides


class _Marks:
    """A logits processor that changes nothing, and notes how long some lists are before the first token."""

    def __init__(self, lists: Sequence[list[int]]) -> None:
        self._lists = lists
        self.starts = [len(entries) for entries in lists]
        self.stops: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``scores`` as they are."""
        self.stops = self.stops or [len(entries) for entries in self._lists]
        return scores

    def sides(self) -> list[tuple[list[int], list[int]]]:
        """Each list's entries before the first token, and since."""
        marks = zip(self._lists, self.starts, self.stops, strict=True)
        return [(entries[start:stop], entries[stop:]) for entries, start, stop in marks]


def turns(
    backbone: HfEngine, folder: Path, rule: EditPolicy | None, count: int, pictures: bool = True
) -> list[Turn]:
    """A session of equal turns, a picture and a question each or a question, over a store in ``folder``."""
    found = []
    with ExitStack() as held:
        store = held.enter_context(ChunkStore.open(folder))
        session = ChatSession(backbone, store, policy=ReusePolicy(certified=True), edit_policy=rule)
        lists = (
            held.enter_context(tapped(ChunkStore, "put_many")),
            held.enter_context(tapped(os, "fsync")),
            held.enter_context(tapped(syncing, "_syncfs")),
            held.enter_context(watching(backbone)).spans,
        )
        for number in range(count):
            picture = {"type": "image", "image": picture_of(random.Random(number), SIDE)}
            asked = {"type": "text", "text": "value of tag 3?"}
            message = {"role": "user", "content": [picture, asked] if pictures else [asked]}
            marks = _Marks(lists)
            with profiled() as counter:
                session.send(message, max_new_tokens=1, do_sample=False, logits_processor=[marks])
            session.flush()
            *_, (before, after) = sides = marks.sides()
            put, each, whole, ran = (Sides(len(early), len(late)) for early, late in sides)
            synced = Sides(each.before + whole.before, each.after + whole.after)
            tokens = Sides(sum(before), sum(after))
            plans = counter.calls_of("window/plan.py", "plan")
            found.append(Turn(counter.calls, plans, put, synced, ran, tokens))
    return found


def growth(found: Sequence[Turn], equal: int) -> dict[str, float]:
    """How many times the calls of some turns the last one has: the first, and the first ``equal`` one."""
    turns = sorted({1, min(equal, len(found))})
    return {f"turn {i}": round(found[-1].calls / found[i - 1].calls, 3) for i in turns}

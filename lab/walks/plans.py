"""The time of a plan: milliseconds of this machine's processor for requests to a window of many slots."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.window import Append, Arrange, Evict, Plan, Reorder
from lab.replay.scripts import picture_of

ROUNDS = 31


def plans(backbone: HfEngine, slots: int, rounds: int = ROUNDS) -> Iterator[tuple[str, float, float]]:
    """Each request with the median and the largest of several plans, in milliseconds."""
    draw = random.Random(0)
    window = KameraWindow(
        backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=ReusePolicy(certified=True)
    )
    first, *rest, new = [backbone.chunk(picture_of(draw, 32)) for _ in range(slots + 2)]
    for chunk in (first, *rest):
        window.append(chunk)
    window.slide()  # what leaves is archived, and can be recalled
    window.flush()
    order = list(window.slots)
    requests: dict[str, Callable[[], Plan]] = {
        "append, new": lambda: window.plan(Append(new)),
        "recall": lambda: window.plan_recall(first.id),
        "slide": window.plan_slide,
        "evict the middle one": lambda: window.plan(Evict(slots // 2)),
        "reorder the last two": lambda: window.plan(
            Reorder(
                [*range(slots - 2), slots - 1, slots - 2],
            )
        ),
        "arrange, one new behind": lambda: window.plan(Arrange([*order, new])),
        "arrange, the oldest gone, one new behind": lambda: window.plan(Arrange([*order[1:], new])),
    }
    for name, make in requests.items():
        make()
        spent = [_milliseconds(make) for _ in range(rounds)]
        yield name, round(statistics.median(spent), 3), round(max(spent), 3)


def _milliseconds(make: Callable[[], Plan]) -> float:
    started = time.process_time()
    make()
    return (time.process_time() - started) * 1e3

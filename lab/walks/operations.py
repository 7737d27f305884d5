"""Window operations, each once: frames of `kamera` in the calling thread, their files and depth, forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from lab.walks.counter import profiled

LAYOUT = "LRLIL"
"""The frames of an episode: four stand in the window, the last one is the new one."""


@dataclass(frozen=True)
class Walk:
    """What an operation ran through; ``forwards`` as its report counts them."""

    operation: str
    calls: int
    files: int
    depth: int
    forwards: int


def walk(operation: str, work: Callable[[], Any]) -> Walk:
    """Run ``work``, which returns an operation's report, and count."""
    with profiled() as counter:
        report = work()
    return Walk(operation, counter.calls, counter.files, counter.depth, report.forwards)


def walks(backbone: HfEngine, folder: Path, episode: int, policy: ReusePolicy) -> Iterator[Walk]:
    """Each operation in turn, on one window over a store in ``folder``; later work is done in between.

    A patch is formed at the latest when its antecedents have come back, so "again" comes after that.
    """
    frames = testbed.World(0).episode(episode, layout=LAYOUT).frames
    *standing, new = [backbone.chunk(frame.content) for frame in frames]
    turned = [4, 3, 2, 1, 0]
    with ChunkStore.open(folder) as store:
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)

        def step(operation: str, work: Callable[[], Any]) -> Walk:
            found = walk(operation, work)
            window.flush()
            return found

        for chunk in standing:
            window.append(chunk)
        yield step("append, new", lambda: window.append(new))
        yield step("evict", lambda: window.evict(0))
        yield step("recall", lambda: window.recall(standing[0].id))
        for _ in range(2):
            window.evict(4)
            window.flush()
            found = step("recall, again", lambda: window.recall(standing[0].id))
        yield found
        yield step("reorder", lambda: window.reorder(turned))
        for _ in range(3):
            found = step("reorder, again", lambda: window.reorder(turned))
        yield found
        yield step("slide", lambda: window.slide())


def survivals(backbone: HfEngine, folder: Path, episode: int, policy: ReusePolicy) -> Iterator[Walk]:
    """A slide that runs no forward: under this policy the chunks behind it survive."""
    frames = testbed.World(0).episode(episode, layout=LAYOUT).frames
    with ChunkStore.open(folder) as store:
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
        for frame in frames:
            window.append(backbone.chunk(frame.content))
        window.flush()
        yield walk("slide, survivors", lambda: window.slide())


def returns(backbone: HfEngine, folder: Path, episode: int, policy: ReusePolicy) -> Iterator[Walk]:
    """A slide whose four remaining chunks have stood there before: they have stored patches."""
    frames = testbed.World(0).episode(episode, layout=LAYOUT).frames
    with ChunkStore.open(folder) as store:
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
        first, *others = [backbone.chunk(frame.content) for frame in frames]
        for chunk in others:
            window.append(chunk)
        for _ in range(4):
            window.insert(0, first)
            window.flush()
            found = walk("slide, again", lambda: window.slide())
            window.flush()
        yield found

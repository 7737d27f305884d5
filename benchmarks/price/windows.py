"""Operations of a window of pictures, over and over, each followed by a question, on the shipped backbone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import report
from benchmarks.price.counting import watching
from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine

POLICIES = {"exact": ReusePolicy.exact(), "default": ReusePolicy()}
QUESTION = "value of tag 3?"


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each operation, number of pictures that stay, and policy."""
    backbone = HfEngine(*testbed.load())
    world = testbed.World(seed=0)
    count = max(options.pictures) + options.turns
    frames = [f for e in range(1 + count // 6) for f in world.episode(e, layout="LRLIRL").frames][:count]
    chunks = [backbone.chunk(frame.content) for frame in frames]
    for kept in options.pictures:
        for name, operation in OPERATIONS.items():
            for policy, given in POLICIES.items():
                store = ChunkStore.open("memory://")
                window = KameraWindow(backbone, store, testbed.SYSTEM, policy=given)
                counted = run(backbone, window, operation, chunks[: kept + options.turns], kept)
                yield {"operation": name, "pictures": kept, "policy": policy, **counted}


Operation = Callable[[KameraWindow, Chunk, int], Any]
"""What is done with the chunk of a turn's number."""


def run(
    backbone: HfEngine, window: KameraWindow, operation: Operation, chunks: list[Chunk], kept: int
) -> report.Row:
    """Fill the window, then operate and ask, once for each further chunk."""
    for chunk in chunks[:kept]:
        window.append(chunk)
    window.next_token_logits(QUESTION)
    window.flush()
    with watching(backbone) as ran:
        window.next_token_logits(QUESTION)  # of a window that has not changed
    question = ran.counts[1]
    first = forwards = background = prefix = 0
    before = _shown(window)
    with watching(backbone) as ran:
        for turn, chunk in enumerate(chunks[kept:]):
            start = len(ran.spans)
            operation(window, chunk, turn)
            window.next_token_logits(QUESTION)
            asked = ran.mine(start)
            window.flush()
            first, forwards = first + sum(asked) - question, forwards + len(asked) - 1
            background += sum(ran.spans[start:]) - sum(asked)
            now = _shown(window)
            same = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
            prefix += sum(tokens for _, tokens in now[same:])
            before = now
    return {
        "turns": len(chunks) - kept,
        "first, forwards": forwards,
        "first, tokens": first,
        "prefix cache, tokens": prefix,
        "background, tokens": background,
        "encodes": ran.encodes,
    }


def _shown(window: KameraWindow) -> list[tuple[str, int]]:
    """Ids and lengths of the chunks in view."""
    return [(slot.chunk_id, slot.length) for slot in window.slots]


def _slide(window: KameraWindow, chunk: Chunk, turn: int) -> None:
    window.append(chunk)
    window.slide()


def _slide_first(window: KameraWindow, chunk: Chunk, turn: int) -> None:
    window.slide()
    window.append(chunk)


def _recall(window: KameraWindow, chunk: Chunk, turn: int) -> None:
    oldest = window.slots[0].chunk_id
    window.slide()
    window.recall(oldest)


def _reorder(window: KameraWindow, chunk: Chunk, turn: int) -> None:
    count = len(window.slots)
    window.reorder([*range(1, count), 0])


OPERATIONS: dict[str, Operation] = {
    "append": lambda window, chunk, turn: window.append(chunk),
    "append, slide": _slide,
    "slide, append": _slide_first,
    "slide, recall": _recall,
    "reorder": _reorder,
}

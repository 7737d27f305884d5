"""What a window of pictures holds, as a share of a plain cache of the same tokens."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.window import sequence_of
from lab.replay.scripts import picture_of

SIDE = 128  # pixels of a picture


@dataclass(frozen=True)
class Share:
    """Bytes of a window's parts over those of a cache that holds the KV of its tokens once."""

    memory: str
    tokens: int
    live: float
    copies: float
    encodings: float


def shares(backbone: HfEngine, least: int) -> Iterator[Share]:
    """A window of at least ``least`` tokens, then after it has slid by a chunk; no later work is left."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(folder, memory_limit=0) as store:
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=ReusePolicy(certified=True))

        def share(name: str) -> Share:
            window.flush()
            tokens, held = len(sequence_of(window).input_ids), window.memory()
            plain = tokens * backbone.facts.bytes_per_token
            parts = (round(part / plain, 3) for part in (held.live, held.copies, held.encodings))
            return Share(name, tokens, *parts)

        while len(sequence_of(window).input_ids) < least:
            window.append(backbone.chunk(picture_of(draw, SIDE)))
        yield share("appended")
        window.slide()
        yield share("slid")
